#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <ranges>
#include <span>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/backends/ipc/backend.hpp>
#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/concepts/update_target.hpp>
#include <weightwire/fabrics/shared_memory_arena.hpp>
#include <weightwire/plan/coverage.hpp>

namespace tests {

/// What must succeed has this long.
inline weightwire::deadline in_time() {
    return weightwire::deadline::after(std::chrono::minutes{1});
}
/// What must give up.
inline weightwire::deadline briefly() {
    return weightwire::deadline::after(std::chrono::milliseconds{150});
}

/// A small model of awkward tensors: scalars, none, odd sizes, several pieces.
inline weightwire::manifest awkward_model() {
    using weightwire::dtype;
    return weightwire::manifest{{{"embed", dtype::bf16, {1000, 401}},
                                 {"scalar", dtype::f32, {}},
                                 {"empty", dtype::f32, {0, 5}},
                                 {"odd", dtype::u8, {65'537}},
                                 {"flag", dtype::boolean, {1}},
                                 {"scales", dtype::f8_e8m0fnu, {33, 3}},
                                 {"big", dtype::f64, {131, 700}},
                                 {"pairs", dtype::f4_e2m1_x2, {7, 9}},
                                 {"complex", dtype::complex128, {3, 5}},
                                 {"head", dtype::bf16, {400, 1001}}}};
}

/// The tensors of a model in one arena, filled anew each round.
class weights_in_memory {
public:
    explicit weights_in_memory(const weightwire::manifest& parameters)
        : parameters_{parameters}, arena_{weightwire::shm::arena::bytes_for(parameters)} {
        for (const auto& parameter : parameters.parameters()) {
            tensors_.push_back(arena_.allocate(parameter.dtype, parameter.shape));
        }
        views_.assign(tensors_.begin(), tensors_.end());
    }

    void fill(std::uint64_t round) {
        for (std::size_t i = 0; i < tensors_.size(); ++i) {
            for (std::size_t k = 0; k < tensors_[i].byte_size(); ++k) {
                tensors_[i].data()[k] = expected(round, i, k);
            }
        }
    }
    [[nodiscard]] static std::byte expected(std::uint64_t round, std::size_t i, std::size_t k) {
        return static_cast<std::byte>((round * 131 + i * 31 + k * 7 + k / 251) & 0xFFU);
    }
    /// Name of the first tensor that does not hold `round`'s bytes, or nothing.
    [[nodiscard]] std::string differs(std::uint64_t round) const {
        for (std::size_t i = 0; i < views_.size(); ++i) {
            for (std::size_t k = 0; k < views_[i].byte_size(); ++k) {
                if (views_[i].data()[k] != expected(round, i, k)) {
                    return parameters_[i].name + " at byte " + std::to_string(k);
                }
            }
        }
        return {};
    }
    [[nodiscard]] std::span<const weightwire::tensor_view> views() const { return views_; }
    [[nodiscard]] const std::vector<weightwire::mutable_tensor_view>& tensors() const {
        return tensors_;
    }

private:
    const weightwire::manifest& parameters_;
    weightwire::shm::arena arena_;
    std::vector<weightwire::mutable_tensor_view> tensors_;
    std::vector<weightwire::tensor_view> views_;
};

/// A source over them that can stop before a tensor.
struct views_source {
    static constexpr auto lifetime = weightwire::tensor_lifetime::stable;
    const weightwire::manifest& parameters;
    std::span<const weightwire::tensor_view> views;
    std::function<void(std::size_t)> before{};

    [[nodiscard]] std::span<const weightwire::param_meta> metadata() const {
        return parameters.parameters();
    }
    [[nodiscard]] auto weights() const {
        return std::views::iota(std::size_t{0}, views.size()) |
               std::views::transform([this](std::size_t i) {
                   if (before) {
                       before(i);
                   }
                   return weightwire::named_tensor{.name = parameters[i].name, .tensor = views[i]};
               });
    }
};

/// A worker's destinations, with coverage. Can stop before a tensor is opened.
struct places {
    std::span<const weightwire::mutable_tensor_view> tensors;
    weightwire::coverage coverage;
    std::function<void(std::size_t)> before{};

    weightwire::mutable_tensor_view open(std::size_t i, weightwire::deadline) const {
        if (before) {
            before(i);
        }
        return tensors[i];
    }
    void wrote(std::size_t i, std::uint64_t offset, std::uint64_t count, weightwire::deadline) {
        coverage.wrote(i, offset, count);
    }
};

/// How weights travel.
enum class travel { in_place, window, packed };

inline weightwire::ipc::trainer_init_info info_of(travel how) {
    weightwire::ipc::trainer_init_info info;
    info.packed = how == travel::packed;
    info.packed_buffer_size_bytes = 810'001;  // just above the largest tensor, and not aligned
    info.staging_bytes = 128 << 10U;
    return info;
}

/// The trainer's half with its weights. `peers[i]` is how many ranks peer `i` has.
class ipc_trainer_half {
public:
    ipc_trainer_half(const weightwire::manifest& parameters, travel how, std::vector<int> ranks,
                     weightwire::ipc::trainer_init_info info)
        : parameters_{parameters}, info_{info}, weights{parameters}, sender{info_} {
        int next = 1;
        for (const int count : ranks) {
            peers_.push_back({.name = "peer " + std::to_string(peers_.size()),
                              .world_size = count,
                              .rank_offset = next,
                              .native = true});
            next += count;
        }
        inits = sender.prepare(
            {.parameters = parameters_,
             .peers = peers_,
             .world_size = next,
             .lifetime = how == travel::in_place ? weightwire::tensor_lifetime::stable
                                                 : weightwire::tensor_lifetime::until_next,
             .stable_tensors = how == travel::in_place
                                   ? weights.views()
                                   : std::span<const weightwire::tensor_view>{}});
    }
    ipc_trainer_half(const weightwire::manifest& parameters, travel how, std::vector<int> ranks)
        : ipc_trainer_half{parameters, how, std::move(ranks), info_of(how)} {}

    /// Fills the weights for `round` and sends them. `before(i)` runs before tensor `i` is yielded.
    void send(std::uint64_t round, weightwire::deadline until = in_time(),
              std::stop_token stop = {}, std::function<void(std::size_t)> before = {}) {
        weights.fill(round);
        views_source source{parameters_, weights.views(), std::move(before)};
        weightwire::round_of<views_source> walk{source, parameters_};
        auto stream = walk.stream();
        sender.send(round, 0, stream, until, std::move(stop));
    }

private:
    const weightwire::manifest& parameters_;
    weightwire::ipc::trainer_init_info info_;
    std::vector<weightwire::peer_info> peers_;

public:
    weights_in_memory weights;
    weightwire::ipc::sender sender;
    std::vector<weightwire::transport_init> inits;
    [[nodiscard]] std::string wire_parameters() const { return info_.init_message(); }
};

/// A worker rank's half.
class worker_half {
public:
    worker_half(const weightwire::manifest& parameters, int rank)
        : parameters_{parameters}, landing{parameters}, receiver{{.global_rank = rank}} {}

    void open(std::string_view wire_parameters, std::string_view transport) {
        receiver.open({.wire_parameters = wire_parameters,
                       .transport = transport,
                       .parameters = &parameters_},
                      in_time(), {});
    }
    /// @throws what `receive` throws, or coverage that is not whole.
    void receive(std::uint64_t round, weightwire::deadline until = in_time(),
                 std::function<void(std::size_t)> before = {}, std::stop_token stop = {}) {
        places to{landing.tensors(), weightwire::coverage{parameters_}, std::move(before)};
        weightwire::update_target target{to, parameters_, 0, parameters_.size()};
        receiver.receive({.round = round, .native = true}, target, until, std::move(stop));
        to.coverage.require_all();
    }

private:
    const weightwire::manifest& parameters_;

public:
    weights_in_memory landing;
    weightwire::ipc::receiver receiver;
};

}  // namespace tests
