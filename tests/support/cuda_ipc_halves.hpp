#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/concepts/update_target.hpp>
#include <weightwire/plan/coverage.hpp>

#include "host_cuda_ipc.hpp"

/// @file
/// Weights in pretended device memory, and both halves of `cuda_ipc` driven by hand.

namespace tests::cuda_halves {

using weightwire::backend_traits;
using weightwire::coverage;
using weightwire::deadline;
using weightwire::device;
using weightwire::dtype;
using weightwire::error;
using weightwire::for_each_run;
using weightwire::manifest;
using weightwire::memory_kind;
using weightwire::mutable_tensor_view;
using weightwire::named_tensor;
using weightwire::param_meta;
using weightwire::peer_info;
using weightwire::round_of;
using weightwire::tensor_lifetime;
using weightwire::tensor_view;
using weightwire::transport_init;
using weightwire::update_target;

using sender = backend_traits<host_cuda_ipc>::sender;
using receiver = backend_traits<host_cuda_ipc>::receiver;

inline deadline in_time() { return deadline::after(std::chrono::minutes{1}); }
inline deadline briefly() { return deadline::after(std::chrono::milliseconds{200}); }

inline constexpr device on_gpu{memory_kind::cuda, 0};

inline manifest awkward_model() {
    return manifest{{{"embed", dtype::bf16, {1000, 41}},
                     {"scalar", dtype::f32, {}},
                     {"empty", dtype::f32, {0, 5}},
                     {"odd", dtype::u8, {6'537}},
                     {"flag", dtype::boolean, {1}},
                     {"big", dtype::f64, {131, 70}},
                     {"pairs", dtype::f4_e2m1_x2, {7, 9}},
                     {"head", dtype::bf16, {40, 1001}}}};
}

inline std::byte expected(std::uint64_t round, std::size_t i, std::size_t k) {
    return static_cast<std::byte>((round * 131 + i * 31 + k * 7 + k / 251) & 0xFFU);
}

/// Byte `k` of a tensor in C order.
template <class View, class Visit>
void each_byte(const View& view, Visit visit) {
    std::size_t k = 0;
    for_each_run(view, [&](auto* at, std::size_t count) {
        for (std::size_t j = 0; j < count; ++j) {
            visit(at[j], k++);
        }
    });
}

/// Tensors of a model, wherever a test puts them.
struct weights {
    explicit weights(const manifest& list) : parameters{list} {}

    /// In one allocation, back to back with gaps of 3 bytes, so that addresses are odd.
    static weights in_one_allocation(const manifest& list, std::string refusal = {},
                                     device where = on_gpu) {
        weights made{list};
        std::uint64_t bytes = 64;
        for (const auto& parameter : list.parameters()) {
            bytes += parameter.byte_size() + 3;
        }
        made.memory.push_back(std::make_unique<host_allocation>(bytes, std::move(refusal)));
        auto* at = made.memory.front()->data() + 1;
        for (const auto& parameter : list.parameters()) {
            made.tensors.emplace_back(at, parameter.dtype, parameter.shape, where);
            at += parameter.byte_size() + 3;
        }
        return made;
    }
    void fill(std::uint64_t round) const {
        for (std::size_t i = 0; i < tensors.size(); ++i) {
            each_byte(tensors[i],
                      [&](std::byte& at, std::size_t k) { at = expected(round, i, k); });
        }
    }
    /// The first tensor that does not hold `round`'s bytes, or nothing.
    std::string differs(std::uint64_t round) const {
        std::string found;
        for (std::size_t i = 0; i < tensors.size() && found.empty(); ++i) {
            each_byte(tensors[i], [&](std::byte at, std::size_t k) {
                if (at != expected(round, i, k) && found.empty()) {
                    found = parameters[i].name + " at byte " + std::to_string(k);
                }
            });
        }
        return found;
    }
    std::vector<tensor_view> views() const { return {tensors.begin(), tensors.end()}; }

    const manifest& parameters;
    std::vector<std::unique_ptr<host_allocation>> memory{};
    std::vector<mutable_tensor_view> tensors{};
};

struct views_source {
    const manifest& parameters;
    std::span<const tensor_view> views;
    void* ready_stream = nullptr;
    std::function<void(std::size_t)> before{};
    std::function<void*(std::size_t)> ready_of{};  ///< instead of `ready_stream`

    [[nodiscard]] std::span<const param_meta> metadata() const { return parameters.parameters(); }
    [[nodiscard]] auto weights() const {
        return std::views::iota(std::size_t{0}, views.size()) |
               std::views::transform([this](std::size_t i) {
                   if (before) {
                       before(i);
                   }
                   return named_tensor{.name = parameters[i].name,
                                       .tensor = views[i],
                                       .ready_stream = ready_of ? ready_of(i) : ready_stream};
               });
    }
};

struct places {
    std::span<const mutable_tensor_view> tensors;
    coverage covered;

    mutable_tensor_view open(std::size_t i, deadline) const { return tensors[i]; }
    void wrote(std::size_t i, std::uint64_t offset, std::uint64_t count, deadline) {
        covered.wrote(i, offset, count);
    }
};
struct bounced_places : places {
    bounced_places(std::span<const mutable_tensor_view> to, coverage of)
        : places{to, std::move(of)} {}
    static constexpr bool bounced = true;
};

inline peer_info native_peer() { return {.name = "worker", .native = true}; }

/// A trainer's and a worker's half in this process, a round by hand.
struct pair {
    pair(const weights& of, host_cuda_ipc_info info = {}, bool stable = true)
        : from{of}, info_{info}, half{info_}, views{of.views()} {
        peers.push_back(native_peer());
        inits = half.prepare(
            {.parameters = of.parameters,
             .peers = peers,
             .world_size = 2,
             .lifetime = stable ? tensor_lifetime::stable : tensor_lifetime::until_next,
             .stable_tensors =
                 stable ? std::span<const tensor_view>{views} : std::span<const tensor_view>{}});
    }
    void open(receiver& worker, deadline until = in_time()) const {
        const auto wire = info_.init_message();
        worker.open({.wire_parameters = wire,
                     .transport = inits.front().native,
                     .parameters = &from.parameters},
                    until, {});
    }
    /// One round into `to`; every part's calls as the engine makes them.
    template <class Target = places>
    void round(std::uint64_t number, receiver& worker, std::span<const mutable_tensor_view> to,
               void* ready = nullptr) {
        from.fill(number);
        views_source source{from.parameters, views, ready};
        round_of<views_source> walk{source, from.parameters};
        auto stream = walk.stream();
        Target landing{to, coverage{from.parameters}};
        for (std::size_t part = 0; part < half.parts().size(); ++part) {
            const auto& which = half.parts()[part];
            half.stage(number, part, stream, in_time(), {});
            half.send(number, part, stream, in_time(), {});
            update_target target{landing, from.parameters, which.first, which.count};
            worker.receive({.round = number,
                            .part = part,
                            .first = which.first,
                            .count = which.count,
                            .native = true},
                           target, in_time(), {});
        }
        landing.covered.require_all();
        if (stream.next() != nullptr) {
            throw std::runtime_error{"the parts end before the source"};
        }
    }

    const weights& from;
    host_cuda_ipc_info info_;
    sender half;
    std::vector<tensor_view> views;
    std::vector<peer_info> peers;
    std::vector<transport_init> inits;
};

/// A trainer of two ranks on devices 0 and 1, whose exports rank 0 has.
struct two_ranks {
    two_ranks(const weights& zero, const weights& one, host_cuda_ipc_info of_zero = {},
              host_cuda_ipc_info of_one = {}, std::vector<peer_info> to = {native_peer()})
        : parameters{zero.parameters},
          first{of_zero},
          second{on_device_one(of_one)},
          views{zero.views(), one.views()},
          peers{std::move(to)} {
        exports.push_back(first.export_memory(context_of(0)));
        exports.push_back(second.export_memory(context_of(1)));
    }
    /// Rank 0's; the other rank adopts nothing.
    void prepare() {
        auto context = context_of(0);
        context.peers = peers;
        context.exports = exports;
        inits = first.prepare(context);
    }

    const manifest& parameters;
    sender first;
    sender second;
    std::vector<std::vector<tensor_view>> views;
    std::vector<peer_info> peers;
    std::vector<std::string> exports{};
    std::vector<transport_init> inits{};

private:
    [[nodiscard]] static host_cuda_ipc_info on_device_one(host_cuda_ipc_info info) {
        info.device = 1;
        info.rank = 1;
        return info;
    }
    [[nodiscard]] weightwire::sender_context context_of(std::size_t rank) const {
        return {.parameters = parameters,
                .peers = {},
                .world_size = 3,
                .lifetime = tensor_lifetime::stable,
                .stable_tensors = views[rank]};
    }
};

/// The text of the error that `work` throws.
template <class Work>
std::string failure_of(Work work) {
    try {
        work();
    } catch (const error& failed) {
        return failed.what();
    }
    return "nothing failed";
}
inline bool has(const std::string& text, std::string_view part) {
    return text.find(part) != std::string::npos;
}

}  // namespace tests::cuda_halves
