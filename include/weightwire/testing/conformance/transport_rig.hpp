#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/concepts/update_target.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/failure.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/coverage.hpp>
#include <weightwire/sinks/tensor_copy.hpp>
#include <weightwire/wire/vllm_requests.hpp>

/// @file
/// Both halves of a transport in one process, without engines: what the conformance suite drives,
/// and what a backend's own tests may.

namespace weightwire::testing {

/// Random parameters: every whole-byte dtype, scalars, tensors without bytes, odd sizes, one of
/// more than a megabyte.
/// @param torch_only leave out what vLLM has no name for.
[[nodiscard]] inline manifest random_manifest(std::uint64_t seed, bool torch_only = false) {
    std::mt19937_64 random{seed};
    const auto below = [&](std::uint64_t end) { return static_cast<std::int64_t>(random() % end); };
    std::vector<param_meta> parameters;
    const auto add = [&](dtype type, const shape& extents) {
        parameters.push_back({"layers." + std::to_string(parameters.size() / 4) + ".w" +
                                  std::to_string(parameters.size()),
                              type, extents});
    };
    add(dtype::bf16, {});
    add(dtype::f32, {0, 7});
    add(dtype::u8, {(1 << 20) + 13 + below(100)});
    for (const auto& row : dtype_table) {
        if (item_bits(row.value) % 8 != 0) {
            if (!torch_only) {
                add(row.value, {1 + below(9), 4});
            }
        } else if (!torch_only || !row.torch.empty()) {
            add(row.value, {1 + below(40), 1 + below(40)});
        }
    }
    add(dtype::i64, {1 + below(3), 0, 2});
    add(dtype::f16, {2 + below(9), 3, 1 + below(9)});
    return manifest{std::move(parameters)};
}

/// The bytes of a round: random, other ones each round.
[[nodiscard]] inline std::vector<std::vector<std::byte>> random_bytes(const manifest& parameters,
                                                                      std::uint64_t seed) {
    std::mt19937_64 random{seed};
    std::vector<std::vector<std::byte>> all;
    for (const auto& parameter : parameters.parameters()) {
        auto& bytes = all.emplace_back(static_cast<std::size_t>(parameter.byte_size()));
        for (std::size_t i = 0; i < bytes.size(); i += 8) {
            const auto word = random();
            std::memcpy(bytes.data() + i, &word, std::min<std::size_t>(8, bytes.size() - i));
        }
    }
    return all;
}

/// Strides of a tensor whose last dimension has a gap after every element; only whole-byte types.
[[nodiscard]] inline mutable_tensor_view::strides_type gapped_strides(const shape& extents) {
    auto strides = contiguous_strides(extents);
    for (std::size_t i = 0; i < extents.size(); ++i) {
        strides[i] *= 2;
    }
    return strides;
}

/// A source over bytes of the rig. `Lifetime` is kept to the letter: with `until_next` a tensor's
/// memory is overwritten as soon as the next one is asked for.
template <tensor_lifetime Lifetime>
class rig_source {
public:
    static constexpr tensor_lifetime lifetime = Lifetime;

    rig_source(const manifest& parameters, const std::vector<std::vector<std::byte>>& bytes)
        : parameters_{&parameters}, bytes_{&bytes} {}

    [[nodiscard]] std::span<const param_meta> metadata() const { return parameters_->parameters(); }

    struct end_of_round {};
    class iterator {
    public:
        using value_type = named_tensor;
        using difference_type = std::ptrdiff_t;
        explicit iterator(rig_source& source) : source_{&source} { source.materialize(0); }
        [[nodiscard]] const named_tensor& operator*() const noexcept { return source_->current_; }
        iterator& operator++() {
            source_->materialize(++at_);
            return *this;
        }
        void operator++(int) { ++*this; }
        friend bool operator==(const iterator& at, end_of_round) noexcept { return at.done(); }
        [[nodiscard]] bool done() const noexcept { return at_ == source_->parameters_->size(); }

    private:
        rig_source* source_;
        std::size_t at_ = 0;
    };
    struct range {
        rig_source* source;
        [[nodiscard]] iterator begin() const { return iterator{*source}; }
        [[nodiscard]] end_of_round end() const noexcept { return {}; }
    };
    [[nodiscard]] range weights() { return {this}; }

private:
    void materialize(std::size_t i) {
        std::fill(scratch_.begin(), scratch_.end(), std::byte{0xEE});
        if (i == parameters_->size()) {
            return;
        }
        const auto& parameter = (*parameters_)[i];
        const auto& bytes = (*bytes_)[i];
        current_.name = parameter.name;
        if constexpr (Lifetime == tensor_lifetime::stable) {
            current_.tensor = {bytes.data(), parameter.dtype, parameter.shape};
        } else {
            scratch_.resize(std::max(scratch_.size(), 2 * bytes.size() + 16));
            // Every third one is strided: a source may yield views.
            const bool gaps = i % 3 == 1 && item_bits(parameter.dtype) % 8 == 0;
            const mutable_tensor_view to{
                scratch_.data(), parameter.dtype, parameter.shape,
                gaps ? gapped_strides(parameter.shape) : contiguous_strides(parameter.shape)};
            copy_tensor(to, tensor_view{bytes.data(), parameter.dtype, parameter.shape});
            current_.tensor = to;
        }
    }

    const manifest* parameters_;
    const std::vector<std::vector<std::byte>>* bytes_;
    std::vector<std::byte> scratch_;
    named_tensor current_{};
};

/// One worker rank's destinations, with coverage beside them. One parameter is strided, and one is
/// not wanted.
class rig_landing {
public:
    explicit rig_landing(const manifest& parameters)
        : parameters_{&parameters}, coverage_{parameters} {
        for (const auto& parameter : parameters.parameters()) {
            places_.emplace_back(2 * static_cast<std::size_t>(parameter.byte_size()) + 16,
                                 std::byte{0x55});
        }
    }

    [[nodiscard]] mutable_tensor_view open(std::size_t i, deadline) {
        return is_wanted(i) ? view(i) : mutable_tensor_view{};
    }
    void wrote(std::size_t i, std::uint64_t offset, std::uint64_t count, deadline) {
        coverage_.wrote(i, offset, count);
    }

    /// What differs from `expected`, or an empty string.
    [[nodiscard]] std::string difference(const std::vector<std::vector<std::byte>>& expected) {
        coverage_.require_all();
        for (std::size_t i = 0; i < parameters_->size(); ++i) {
            const auto& parameter = (*parameters_)[i];
            std::vector<std::byte> found(expected[i].size());
            if (is_wanted(i)) {
                copy_tensor({found.data(), parameter.dtype, parameter.shape}, tensor_view{view(i)});
            }
            if (is_wanted(i) && found != expected[i]) {
                return parameter.name + " " + std::string{to_string(parameter.dtype)} +
                       to_string(parameter.shape) + " has other bytes than were sent";
            }
        }
        return {};
    }
    [[nodiscard]] bool whole() const noexcept { return coverage_.all_whole(); }
    /// Ready for the next round.
    void clear() {
        coverage_ = coverage{*parameters_};
        for (auto& place : places_) {
            std::fill(place.begin(), place.end(), std::byte{0x55});
        }
    }

private:
    [[nodiscard]] static bool is_wanted(std::size_t i) noexcept { return i != 4; }
    [[nodiscard]] mutable_tensor_view view(std::size_t i) {
        const auto& parameter = (*parameters_)[i];
        const bool gaps = i % 5 == 3 && item_bits(parameter.dtype) % 8 == 0;
        return {places_[i].data(), parameter.dtype, parameter.shape,
                gaps ? gapped_strides(parameter.shape) : contiguous_strides(parameter.shape)};
    }

    const manifest* parameters_;
    coverage coverage_;
    std::vector<std::vector<std::byte>> places_;
};

/// The halves of `Tag`: one sender, and a receiver a worker rank, each call of which runs on a
/// thread of its own as in an engine.
template <Transport Tag>
class transport_rig {
public:
    using traits = backend_traits<Tag>;

    /// One worker rank.
    struct worker {
        std::size_t peer;
        typename traits::receiver receiver;
        rig_landing landing;
        failure error{};
    };

    /// @param ranks worker ranks behind each peer.
    /// @param vllm speak as to a vLLM server.
    transport_rig(typename traits::init_info info, manifest parameters, std::vector<int> ranks,
                  tensor_lifetime lifetime, bool vllm = false)
        : info_{std::move(info)},
          wire_parameters_{info_.init_message()},
          parameters_{std::move(parameters)},
          bytes_{random_bytes(parameters_, 0)},
          sender_{info_},
          vllm_{vllm} {
        int next = 1;
        for (const int count : ranks) {
            peers_.push_back({.name = "peer " + std::to_string(peers_.size()),
                              .world_size = count,
                              .rank_offset = next,
                              .native = !vllm});
            next += count;
        }
        for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
            for (int local = 0; local < peers_[peer].world_size; ++local) {
                const receiver_context context{.local_rank = local,
                                               .global_rank = peers_[peer].rank_offset + local,
                                               .world_size = next};
                workers_.emplace_back(
                    worker{peer, typename traits::receiver{context}, rig_landing{parameters_}});
            }
        }
        for (std::size_t i = 0; i < parameters_.size(); ++i) {
            stable_.push_back({bytes_[i].data(), parameters_[i].dtype, parameters_[i].shape});
        }
        lifetime_ = lifetime;
        inits_ = sender_.prepare({.parameters = parameters_,
                                  .peers = peers_,
                                  .world_size = next,
                                  .lifetime = lifetime,
                                  .stable_tensors = lifetime == tensor_lifetime::stable
                                                        ? std::span<const tensor_view>{stable_}
                                                        : std::span<const tensor_view>{}});
    }
    transport_rig(const transport_rig&) = delete;
    transport_rig& operator=(const transport_rig&) = delete;

    [[nodiscard]] typename traits::sender& sender() noexcept { return sender_; }
    [[nodiscard]] std::deque<worker>& workers() noexcept { return workers_; }
    [[nodiscard]] const manifest& parameters() const noexcept { return parameters_; }
    [[nodiscard]] const std::vector<transport_init>& inits() const noexcept { return inits_; }
    [[nodiscard]] const std::vector<std::vector<std::byte>>& bytes() const noexcept {
        return bytes_;
    }
    [[nodiscard]] const std::string& wire_parameters() const noexcept { return wire_parameters_; }
    [[nodiscard]] bool vllm() const noexcept { return vllm_; }

    /// What comes before a part's `send`, where the sender stages.
    /// @throws what the sender throws; usage_error it has left some of the part unread.
    void stage([[maybe_unused]] std::uint64_t round, [[maybe_unused]] std::size_t part,
               [[maybe_unused]] tensor_stream& stream, [[maybe_unused]] deadline until,
               [[maybe_unused]] std::stop_token stop) {
        if constexpr (HasStage<typename traits::sender>) {
            const auto before = stream.position();
            sender_.stage(round, part, stream, until, std::move(stop));
            const auto& share = sender_.parts()[part];
            const auto end = std::max({before, share.first + share.count, share.read_until});
            if (stream.position() != end) {
                throw usage_error{"stage of part " + std::to_string(part) + " ended at tensor " +
                                  std::to_string(stream.position()) + ", its part ends at " +
                                  std::to_string(end) + "; see update_part::read_until"};
            }
        }
    }

    /// Opens one receiver, on this thread.
    void open_worker(worker& one, deadline until, std::stop_token stop = {}) {
        const auto& init = inits_[one.peer];
        one.receiver.open(
            {.wire_parameters = vllm_ ? init.vllm.front().init_info : wire_parameters_,
             .transport = vllm_ ? std::string_view{} : init.native,
             .parameters = vllm_ ? nullptr : &parameters_},
            until, std::move(stop));
    }

    /// Opens the workers that `picked` picks, and the sender beside them when `with_sender`.
    /// @throws the first failure.
    template <class Pick>
    void open(deadline until, Pick picked, bool with_sender = true) {
        beside(
            picked, [&](worker& one) { open_worker(one, until, stop_.get_token()); },
            [&] {
                if (with_sender) {
                    sender_.open(until, stop_.get_token());
                }
            });
    }
    void open(deadline until) {
        open(until, [](const worker&) { return true; });
    }

    /// Moves one round to the workers that `picked` picks.
    /// @throws the first failure.
    template <class Pick>
    void move(std::uint64_t round, deadline until, Pick picked) {
        refill(round);
        if (lifetime_ == tensor_lifetime::stable) {
            rig_source<tensor_lifetime::stable> source{parameters_, bytes_};
            move_from(source, round, until, picked);
        } else {
            rig_source<tensor_lifetime::until_next> source{parameters_, bytes_};
            move_from(source, round, until, picked);
        }
    }

    /// `move` to all, then a look at what every rank has. Returns what is wrong.
    [[nodiscard]] std::string round(std::uint64_t number, deadline until) {
        move(number, until, [](const worker&) { return true; });
        for (std::size_t i = 0; i < workers_.size(); ++i) {
            const auto wrong = workers_[i].landing.difference(bytes_);
            if (!wrong.empty()) {
                return "round " + std::to_string(number) + ", worker rank " +
                       std::to_string(i + 1) + ": " + wrong;
            }
        }
        return digests_differ();
    }

    /// One worker's share of one part, on this thread.
    void receive(worker& one, std::uint64_t round, std::size_t part, deadline until,
                 std::stop_token stop) {
        const auto& share = sender_.parts()[part];
        std::optional<wire::vllm_update_request> request;
        update_message message{.round = round, .part = part, .native = true};
        if (vllm_) {
            request = wire::parse_vllm_update(
                share.vllm_bodies.at(inits_.front().vllm.front().update_body));
            message = {.extras = request->entries.front().extras};
        }
        update_target target{one.landing, parameters_, share.first, share.count};
        one.receiver.receive(message, target, until, std::move(stop));
    }

    /// Runs `theirs(worker)` on a thread for each worker that `picked` picks and `ours()` here;
    /// whichever fails first stops the others.
    /// @throws the root cause.
    template <class Pick, class Theirs, class Ours>
    void beside(Pick picked, Theirs theirs, Ours ours) {
        stop_ = std::stop_source{};
        failure mine;
        {
            std::vector<std::jthread> threads;
            for (auto& one : workers_) {
                one.error = {};
                if (picked(one)) {
                    threads.emplace_back([&] {
                        try {
                            theirs(one);
                        } catch (...) {
                            one.error = failure::current(phase::update);
                            stop_.request_stop();
                        }
                    });
                }
            }
            try {
                ours();
            } catch (...) {
                mine = failure::current(phase::update);
                stop_.request_stop();
            }
        }
        raise_first(mine);
    }

private:
    /// New bytes in the same places, as an optimizer step makes them.
    void refill(std::uint64_t round) {
        const auto fresh = random_bytes(parameters_, round * 7919 + 1);
        for (std::size_t i = 0; i < bytes_.size(); ++i) {
            std::copy(fresh[i].begin(), fresh[i].end(), bytes_[i].begin());
        }
        for (auto& one : workers_) {
            one.landing.clear();
        }
    }

    template <class Source, class Pick>
    void move_from(Source& source, std::uint64_t round, deadline until, Pick picked) {
        round_of walk{source, parameters_};
        auto stream = walk.stream();
        for (std::size_t part = 0; part < sender_.parts().size(); ++part) {
            stop_ = std::stop_source{};
            stage(round, part, stream, until, stop_.get_token());
            beside(
                picked, [&](worker& one) { receive(one, round, part, until, stop_.get_token()); },
                [&] { sender_.send(round, part, stream, until, stop_.get_token()); });
        }
        if (stream.next() != nullptr) {
            throw usage_error{"the parts end before the source does"};
        }
    }

    [[nodiscard]] std::string digests_differ() const {
        if constexpr (HasDigests<typename traits::sender>) {
            const std::span<const std::uint64_t> found = sender_.digests();
            if (!found.empty() && found.size() != parameters_.size()) {
                return "digests() has " + std::to_string(found.size()) + " entries";
            }
            for (std::size_t i = 0; i < found.size(); ++i) {
                if (found[i] != digest(bytes_[i])) {
                    return "the digest of " + parameters_[i].name + " is not that of its bytes";
                }
            }
        }
        return {};
    }

    /// A stop, or a side that hung up, follows from another failure where there is one.
    void raise_first(const failure& mine) const {
        const failure* cause = nullptr;
        const auto weight = [](const failure& one) {
            return !one ? 0 : one.kind == "cancelled" ? 1 : one.kind == "peer" ? 2 : 3;
        };
        const auto look = [&](const failure& one) {
            if (one && (cause == nullptr || weight(one) > weight(*cause))) {
                cause = &one;
            }
        };
        look(mine);
        for (const auto& one : workers_) {
            look(one.error);
        }
        if (cause != nullptr) {
            cause->raise();
        }
    }

    typename traits::init_info info_;
    std::string wire_parameters_;
    manifest parameters_;
    std::vector<std::vector<std::byte>> bytes_;
    std::vector<tensor_view> stable_;
    std::vector<peer_info> peers_;
    typename traits::sender sender_;
    std::vector<transport_init> inits_;
    std::deque<worker> workers_;
    std::stop_source stop_;
    tensor_lifetime lifetime_ = tensor_lifetime::until_next;
    bool vllm_;
};

}  // namespace weightwire::testing
