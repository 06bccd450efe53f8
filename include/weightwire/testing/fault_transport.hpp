#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <unistd.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/rendezvous/socket.hpp>
#include <weightwire/sinks/tensor_copy.hpp>
#include <weightwire/testing/fault_plan.hpp>

/// @file
/// The fault transport: another backend, with what you planned going wrong in it.
///
/// @code
/// auto info = testing::with_faults(ipc::trainer_init_info{},
///                                  {{.kind = testing::fault_kind::flip_sent_byte,
///                                    .tensor = "lm_head.weight", .byte = 17}});
/// auto engine = trainer_init(info, client, source);
/// @endcode
///
/// It speaks the inner backend's wire under its name. A plan with faults in the trainer alone
/// leaves no trace on the wire, so the workers may be any; faults in workers travel in the wire
/// parameters and need workers of `fault<Inner>`.

namespace weightwire::testing {

/// The tag: the backend of `Inner` with faults.
template <class Inner>
struct fault {};

/// The inner backend's choices, and the plan.
template <class InnerInfo>
struct fault_init_info : InnerInfo {
    using backend = fault<typename InnerInfo::backend>;
    std::vector<fault_point> faults{};

    /// The inner message, with `weightwire_faults` in it where workers have any.
    [[nodiscard]] std::string init_message() const {
        const auto theirs = encode_worker_faults(faults);
        const std::string message = InnerInfo::init_message();
        return theirs.empty() ? message : add_member(message, faults_member, theirs);
    }
};

/// `info` with a plan.
template <TrainerInitInfo InnerInfo>
[[nodiscard]] fault_init_info<InnerInfo> with_faults(InnerInfo info,
                                                     std::vector<fault_point> faults) {
    return {std::move(info), std::move(faults)};
}

namespace detail {

/// Does nothing until the deadline or the stop. @throws timeout_error, cancelled_error.
[[noreturn]] inline void stall(deadline until, const std::stop_token& stop,
                               const error_context& where) {
    std::mutex mutex;
    std::condition_variable_any never;
    std::unique_lock lock{mutex};
    never.wait_until(lock, stop, until.when(), [] { return false; });
    rendezvous::detail::check_wait(until, stop, "stalling as the fault plan says", where);
    throw timeout_error{"the stall that the fault plan asks for has ended", where};
}

/// Carries out a fault that ends or holds up a whole call.
inline void carry_out(const fault_point& point, deadline until, const std::stop_token& stop,
                      error_context where) {
    where.operation = to_string(point.kind);
    switch (point.kind) {
        case fault_kind::throw_in_send:
        case fault_kind::throw_in_open:
        case fault_kind::throw_in_receive:
            throw resource_error{"an injected fault; nothing is really wrong", where};
        case fault_kind::stall_in_send:
        case fault_kind::stall_in_receive: stall(until, stop, where);
        case fault_kind::kill_in_send:
        case fault_kind::kill_in_receive: ::_exit(killed_by_fault);
        default: return;
    }
}

/// Changes the lowest bit of byte `byte`, in C order, of `tensor`.
inline void flip_byte(const mutable_tensor_view& tensor, std::uint64_t byte,
                      const error_context& where) {
    if (tensor.data() == nullptr || tensor.device().kind != memory_kind::host) {
        throw unsupported_error{"a byte can be flipped only in host memory that is written", where};
    }
    std::uint64_t seen = 0;
    for_each_run(tensor, [&](std::byte* run, std::size_t size) {
        if (byte >= seen && byte - seen < size) {
            run[byte - seen] ^= std::byte{1};
        }
        seen += size;
    });
}

/// A round's tensors with the planned bytes changed: a source over the engine's stream.
class corrupted_source {
public:
    /// What changes in this round. `faults` lives as long as this object.
    explicit corrupted_source(const std::vector<fault_point>& faults) noexcept : faults_{&faults} {}

    void begin_round(std::uint64_t round) {
        round_ = round;
        digests_.clear();
    }
    void read_from(tensor_stream& stream) noexcept { stream_ = &stream; }
    /// Manifest positions of the changed tensors, with their true digests.
    [[nodiscard]] const std::vector<std::pair<std::size_t, std::uint64_t>>& digests() const {
        return digests_;
    }

    /// Only as `WeightSource` asks for it.
    [[nodiscard]] std::span<const param_meta> metadata() const {
        return stream_->manifest().parameters();
    }

    struct end_of_round {};
    class iterator {
    public:
        using value_type = named_tensor;
        using difference_type = std::ptrdiff_t;
        explicit iterator(corrupted_source& source) : source_{&source} {}
        [[nodiscard]] const named_tensor& operator*() const noexcept { return *source_->current_; }
        iterator& operator++() {
            source_->pull();
            return *this;
        }
        void operator++(int) { ++*this; }
        [[nodiscard]] bool at_end() const noexcept { return source_->current_ == nullptr; }
        friend bool operator==(const iterator& at, end_of_round) noexcept { return at.at_end(); }

    private:
        corrupted_source* source_;
    };
    struct range {
        corrupted_source* source;
        [[nodiscard]] iterator begin() const {
            source->pull();
            return iterator{*source};
        }
        [[nodiscard]] end_of_round end() const noexcept { return {}; }
    };
    [[nodiscard]] range weights() { return {this}; }

private:
    void pull() {
        const auto position = stream_->position();
        current_ = stream_->next();
        for (const auto& point : *faults_) {
            if (current_ != nullptr && point.kind == fault_kind::flip_sent_byte &&
                point.is_in(round_) && point.tensor == current_->name) {
                corrupt(position, point);
            }
        }
    }

    void corrupt(std::size_t position, const fault_point& point) {
        const auto& tensor = current_->tensor;
        const error_context where{.phase = phase::update, .tensor = point.tensor};
        if (tensor.device().kind != memory_kind::host) {
            throw unsupported_error{"a byte can be flipped only in host memory", where};
        }
        if (current_ != &changed_) {
            copy_.resize(tensor.byte_size());
            const mutable_tensor_view to{copy_.data(), tensor.type(), tensor.extents()};
            copy_tensor(to, tensor);
            digests_.emplace_back(position, digest(copy_));
            changed_ = {.name = current_->name, .tensor = to};
            current_ = &changed_;
        }
        flip_byte({copy_.data(), tensor.type(), tensor.extents()}, point.byte, where);
    }

    const std::vector<fault_point>* faults_;
    tensor_stream* stream_ = nullptr;
    std::uint64_t round_ = 0;
    const named_tensor* current_ = nullptr;
    named_tensor changed_{};
    std::vector<std::byte> copy_;
    std::vector<std::pair<std::size_t, std::uint64_t>> digests_;
};

}  // namespace detail

/// The trainer's half. With bytes to flip it keeps stable addresses from the inner sender, which
/// then reads the stream, and so the changed copy.
template <class Inner>
class fault_sender {
    using inner_traits = backend_traits<Inner>;
    using inner_sender = typename inner_traits::sender;

public:
    explicit fault_sender(const fault_init_info<typename inner_traits::init_info>& info)
        : faults_{info.faults},
          sender_{static_cast<const typename inner_traits::init_info&>(info)},
          source_{faults_} {}
    fault_sender(const fault_sender&) = delete;
    fault_sender& operator=(const fault_sender&) = delete;

    [[nodiscard]] std::vector<transport_init> prepare(const sender_context& context) {
        auto inits = sender_.prepare(inner_context(context));
        const auto theirs = encode_worker_faults(faults_);
        for (auto& init : inits) {
            for (auto& form : init.vllm) {
                form.init_info = theirs.empty() ? form.init_info
                                                : add_member(form.init_info, faults_member, theirs);
            }
        }
        return inits;
    }

    void open(deadline until, std::stop_token stop) {
        sender_.open(until, stop);
        check_plan(faults_, *parameters_, parts().size());
    }

    [[nodiscard]] std::span<const update_part> parts() const { return sender_.parts(); }

    void send(std::uint64_t round, std::size_t part, tensor_stream& stream, deadline until,
              std::stop_token stop) {
        for (const auto& point : faults_) {
            if (in_trainer(point.kind) && is_about_part(point.kind) && point.is_in(round) &&
                point.part == part) {
                detail::carry_out(
                    point, until, stop,
                    {.phase = phase::update, .backend = std::string{inner_traits::wire_name}});
            }
        }
        if (!has(fault_kind::flip_sent_byte)) {
            sender_.send(round, part, stream, until, stop);
        } else {
            auto changed = changed_stream(round, part == 0 && !HasStage<inner_sender>, stream);
            sender_.send(round, part, changed, until, stop);
        }
    }

    /// Faults in sending come in `send`; bytes are flipped wherever tensors are read.
    void stage(std::uint64_t round, std::size_t part, tensor_stream& stream, deadline until,
               std::stop_token stop)
        requires HasStage<inner_sender>
    {
        if (!has(fault_kind::flip_sent_byte)) {
            sender_.stage(round, part, stream, until, stop);
        } else {
            auto changed = changed_stream(round, part == 0, stream);
            sender_.stage(round, part, changed, until, stop);
        }
    }
    [[nodiscard]] std::string export_memory(const sender_context& context)
        requires HasRankExports<inner_sender>
    {
        return sender_.export_memory(inner_context(context));
    }
    [[nodiscard]] std::string shared_plan() const
        requires HasRankExports<inner_sender>
    {
        return sender_.shared_plan();
    }
    void adopt_plan(std::string_view plan)
        requires HasRankExports<inner_sender>
    {
        sender_.adopt_plan(plan);
    }

    void close(deadline until) { sender_.close(until); }

    /// Those of the unchanged tensors: the fault is in flight, after they were taken.
    [[nodiscard]] std::span<const std::uint64_t> digests() const
        requires HasDigests<inner_sender>
    {
        const std::span<const std::uint64_t> inner = sender_.digests();
        digests_.assign(inner.begin(), inner.end());
        for (const auto& [position, value] : source_.digests()) {
            if (position < digests_.size()) {
                digests_[position] = value;
            }
        }
        return digests_;
    }
    void drop_peer(std::size_t peer) noexcept
        requires HasDropPeer<inner_sender>
    {
        sender_.drop_peer(peer);
    }
    void restore_peer(std::size_t peer)
        requires HasDropPeer<inner_sender>
    {
        sender_.restore_peer(peer);
    }
    [[nodiscard]] std::string description() const {
        const auto mine = std::to_string(faults_.size()) + " injected faults";
        if constexpr (HasDescription<inner_sender>) {
            return sender_.description() + ", with " + mine;
        } else {
            return mine;
        }
    }

private:
    [[nodiscard]] bool has(fault_kind kind) const noexcept {
        for (const auto& point : faults_) {
            if (point.kind == kind) {
                return true;
            }
        }
        return false;
    }

    /// What the inner sender is told: where bytes are to be flipped, nothing of stable addresses.
    [[nodiscard]] sender_context inner_context(const sender_context& context) {
        parameters_ = &context.parameters;
        const bool flips = has(fault_kind::flip_sent_byte);
        return {.parameters = context.parameters,
                .peers = context.peers,
                .world_size = context.world_size,
                .lifetime = flips ? tensor_lifetime::until_next : context.lifetime,
                .stable_tensors = flips ? std::span<const tensor_view>{} : context.stable_tensors,
                .exports = context.exports};
    }

    /// One checked stream over the engine's lasts the whole round, as positions go on over parts.
    [[nodiscard]] tensor_stream changed_stream(std::uint64_t round, bool begins,
                                               tensor_stream& stream) {
        source_.read_from(stream);
        if (begins) {
            source_.begin_round(round);
            round_.emplace(source_, *parameters_);
        }
        return round_->stream();
    }

    std::vector<fault_point> faults_;
    inner_sender sender_;
    detail::corrupted_source source_;
    std::optional<round_of<detail::corrupted_source>> round_;
    const manifest* parameters_ = nullptr;
    mutable std::vector<std::uint64_t> digests_;
};

/// The worker's half: takes its faults from the wire parameters.
template <class Inner>
class fault_receiver {
    using inner_traits = backend_traits<Inner>;
    using inner_receiver = typename inner_traits::receiver;

public:
    explicit fault_receiver(const receiver_context& context)
        : context_{context}, receiver_{context} {}

    void open(const transport_open& init, deadline until, std::stop_token stop) {
        std::string parameters{init.wire_parameters};
        faults_ = take_faults(parameters);
        std::erase_if(faults_, [&](const fault_point& point) {
            return point.rank >= 0 && point.rank != context_.global_rank;
        });
        rounds_ = 0;
        for (const auto& point : faults_) {
            if (point.kind == fault_kind::throw_in_open) {
                detail::carry_out(point, until, stop, where(phase::init));
            }
        }
        auto inner = init;
        inner.wire_parameters = parameters;
        receiver_.open(inner, until, stop);
    }

    void receive(const update_message& message, update_target& target, deadline until,
                 std::stop_token stop) {
        rounds_ += message.part == 0 ? 1 : 0;  // vLLM's updates carry no round
        const auto round = message.round != 0 ? message.round : rounds_;
        bool about_tensor = false;
        for (const auto& point : faults_) {
            if (!point.is_in(round)) {
                continue;
            }
            about_tensor = about_tensor || is_about_tensor(point.kind);
            if (is_about_part(point.kind) && point.part == message.part) {
                detail::carry_out(point, until, stop, where(phase::update));
            }
        }
        if (!about_tensor) {
            receiver_.receive(message, target, until, stop);
            return;
        }
        tampering state{*this, target, round, std::vector<mutable_tensor_view>(target.size())};
        const auto parameters = parameters_of(target);
        update_target tampered{state, parameters, 0, parameters.size()};
        receiver_.receive(message, tampered, until, stop);
    }

    void release() noexcept { receiver_.release(); }

private:
    /// Stands between the inner receiver and the engine's target.
    struct tampering {
        fault_receiver& owner;
        update_target& target;
        std::uint64_t round;
        std::vector<mutable_tensor_view> opened;

        [[nodiscard]] mutable_tensor_view open(std::size_t i, deadline until) {
            return opened[i] = target.open(i, until);
        }
        void wrote(std::size_t i, std::uint64_t offset, std::uint64_t count, deadline until) {
            const auto& name = target.parameter(i).name;
            int times = 1;
            for (const auto& point : owner.faults_) {
                const bool here = point.byte >= offset &&
                                  (point.byte - offset < count || (count == 0 && point.byte == 0));
                if (!here || point.tensor != name || !point.is_in(round)) {
                    continue;
                }
                if (point.kind == fault_kind::flip_received_byte) {
                    auto context = owner.where(phase::update);
                    context.tensor = name;
                    detail::flip_byte(opened[i], point.byte, context);
                }
                times = point.kind == fault_kind::drop_piece        ? 0
                        : point.kind == fault_kind::duplicate_piece ? 2
                                                                    : times;
            }
            for (; times > 0; --times) {
                target.wrote(i, offset, count, until);
            }
        }
    };

    [[nodiscard]] static manifest parameters_of(const update_target& target) {
        std::vector<param_meta> list;
        for (std::size_t i = 0; i < target.size(); ++i) {
            list.push_back(target.parameter(i));
        }
        return manifest{std::move(list)};
    }

    [[nodiscard]] error_context where(phase when) const {
        return {.phase = when,
                .backend = std::string{inner_traits::wire_name},
                .rank = context_.local_rank};
    }

    receiver_context context_;
    inner_receiver receiver_;
    std::vector<fault_point> faults_;
    std::uint64_t rounds_ = 0;
};

}  // namespace weightwire::testing

namespace weightwire {

/// Models `Transport` where `Inner` does, with the optional abilities that `Inner` has.
template <class Inner>
struct backend_traits<testing::fault<Inner>> {
    static constexpr std::string_view wire_name = backend_traits<Inner>::wire_name;
    static constexpr transport_capabilities capabilities = backend_traits<Inner>::capabilities;
    using init_info = testing::fault_init_info<typename backend_traits<Inner>::init_info>;
    using sender = testing::fault_sender<Inner>;
    using receiver = testing::fault_receiver<Inner>;
};

}  // namespace weightwire
