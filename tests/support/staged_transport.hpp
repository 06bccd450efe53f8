#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/shared_memory.hpp>
#include <weightwire/rendezvous/socket.hpp>
#include <weightwire/sinks/tensor_copy.hpp>
#include <weightwire/testing/gate.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/json_writer.hpp>

/// @file
/// A transport whose sender stages and whose trainer ranks all serve, over shared host memory: what
/// the engine's tests use where a GPU's memory would be read. Worker rank `g` reads the memory of
/// trainer rank `(g - 1) % ranks`.

namespace tests {

/// What halves of the staged transport did, in order. Thread-safe.
class journal {
public:
    void note(std::string text) {
        const std::lock_guard lock{mutex_};
        entries_.push_back(std::move(text));
    }
    [[nodiscard]] std::vector<std::string> entries() const {
        const std::lock_guard lock{mutex_};
        return entries_;
    }
    [[nodiscard]] std::size_t count(std::string_view text) const {
        const auto all = entries();
        return static_cast<std::size_t>(std::count(all.begin(), all.end(), text));
    }
    /// Where `text` stands the `nth` time; the number of entries where it does not.
    [[nodiscard]] std::size_t place(std::string_view text, std::size_t nth = 1) const {
        const auto all = entries();
        std::size_t i = 0;
        for (; i < all.size() && (all[i] != text || --nth != 0); ++i) {
        }
        return i;
    }
    void clear() {
        const std::lock_guard lock{mutex_};
        entries_.clear();
    }

private:
    mutable std::mutex mutex_;
    std::vector<std::string> entries_;
};

/// What a rank's sender does beside its work. Outlives the sender.
struct stage_script {
    journal* log = nullptr;
    std::string gate{};             ///< passed at the begin of each `stage`; empty: none
    std::atomic<int> fails_in{-1};  ///< part whose `stage` throws after its first tensor
    std::atomic<int> dies_in{-1};   ///< part whose `stage` ends the process at its end
    bool exports_nothing = false;   ///< `export_memory` throws
    bool misreads_plan = false;     ///< `adopt_plan` makes one part too many
    bool always_ahead = false;      ///< reads ahead, whatever number of ranks serves
};

/// The tag; workers note into `log`, and refuse the update calls of round `*refused`.
struct staged {
    journal* log = nullptr;
    const std::atomic<std::uint64_t>* refused = nullptr;
};
/// The same, where one peer's failure need not stop the others.
struct dropping_staged : staged {};

struct staged_init_info {
    using backend = staged;
    int rank = 0;
    std::size_t parts = 1;
    bool ahead = false;        ///< `send` reads the next part, where rank 0 is the only one
    bool whole_first = false;  ///< of two parts the first `stage` reads both
    stage_script* script = nullptr;
    [[nodiscard]] std::string init_message() const { return "{}"; }
};
struct dropping_staged_init_info : staged_init_info {
    using backend = dropping_staged;
};

/// Gathers a part into one of two slots of its memory, where the workers read it.
class staged_sender {
public:
    explicit staged_sender(const staged_init_info& info) : info_{info} {}

    [[nodiscard]] std::string export_memory(const weightwire::sender_context& context) {
        note("export");
        if (info_.script != nullptr && info_.script->exports_nothing) {
            throw weightwire::resource_error{"this rank exports nothing"};
        }
        allocate(context);
        return exported();
    }
    [[nodiscard]] std::vector<weightwire::transport_init> prepare(
        const weightwire::sender_context& context) {
        note("prepare");
        alone_ = context.exports.empty();
        if (alone_) {
            allocate(context);
        }
        cut(info_.parts);
        const std::string mine = exported();
        std::string text;
        weightwire::wire::json_writer writer{text};
        writer.begin_object().key("slot_bytes").integer(slot_bytes_).key("regions").begin_array();
        for (const auto& one : alone_ ? std::span{&mine, 1} : context.exports) {
            writer.string(one);
        }
        writer.end_array().end_object();
        return std::vector<weightwire::transport_init>(context.peers.size(), {.native = text});
    }
    [[nodiscard]] std::string shared_plan() const { return std::to_string(parts_.size()); }
    void adopt_plan(std::string_view plan) {
        note("adopt");
        std::size_t count = 0;
        std::from_chars(plan.data(), plan.data() + plan.size(), count);
        cut(count + (info_.script != nullptr && info_.script->misreads_plan ? 1 : 0));
    }
    void open(weightwire::deadline, std::stop_token) {}
    [[nodiscard]] std::span<const weightwire::update_part> parts() const noexcept { return parts_; }

    void stage(std::uint64_t round, std::size_t part, weightwire::tensor_stream& stream,
               weightwire::deadline until, std::stop_token stop) {
        note("stage " + std::to_string(part));
        if (info_.script != nullptr && !info_.script->gate.empty()) {
            weightwire::testing::pass_gate(info_.script->gate, until, stop, where());
        }
        if (round_ != round) {
            round_ = round;
            read_ = 0;
        }
        read_part(part, stream, until, stop);
        if (info_.whole_first && part == 0) {
            read_part(1, stream, until, stop);
        }
        if (info_.script != nullptr && info_.script->dies_in == static_cast<int>(part)) {
            ::_exit(86);
        }
        note("staged " + std::to_string(part));
    }
    void send(std::uint64_t, std::size_t part, weightwire::tensor_stream& stream,
              weightwire::deadline until, std::stop_token stop) {
        note("send " + std::to_string(part));
        const bool may = alone_ || (info_.script != nullptr && info_.script->always_ahead);
        if (info_.ahead && may && part + 1 < parts_.size()) {
            read_part(part + 1, stream, until, stop);
        }
    }
    void close(weightwire::deadline) {
        note("close");
        memory_ = {};
    }

private:
    [[nodiscard]] static weightwire::error_context where() {
        return {.phase = weightwire::phase::update, .backend = "staged"};
    }
    void note(const std::string& what) const {
        if (info_.script != nullptr && info_.script->log != nullptr) {
            info_.script->log->note(std::to_string(info_.rank) + ": " + what);
        }
    }

    /// Two slots, each large enough for any part.
    void allocate(const weightwire::sender_context& context) {
        parameters_ = &context.parameters;
        slot_bytes_ = 8;
        for (const auto& parameter : context.parameters.parameters()) {
            slot_bytes_ += (parameter.byte_size() + 7) / 8 * 8;
        }
        memory_ = weightwire::shm::segment::create(2 * slot_bytes_);
    }
    [[nodiscard]] std::string exported() const {
        const auto handle = memory_.exported();
        return std::to_string(handle.pid) + " " + std::to_string(handle.fd) + " " +
               std::to_string(handle.start_time) + " " + std::to_string(handle.length);
    }
    void cut(std::size_t parts) {
        const auto count = std::min(parts, parameters_->size());
        parts_.clear();
        for (std::size_t i = 0; i < count; ++i) {
            const auto first = parameters_->size() * i / count;
            parts_.push_back({first, parameters_->size() * (i + 1) / count - first, {}});
        }
        if (info_.whole_first) {
            parts_.front().read_until = parameters_->size();
        }
    }

    void read_part(std::size_t part, weightwire::tensor_stream& stream, weightwire::deadline until,
                   const std::stop_token& stop) {
        if (part < read_) {
            return;  // `send` of the part before has
        }
        auto* to = memory_.data() + part % 2 * slot_bytes_;
        for (std::size_t i = 0; i < parts_[part].count; ++i) {
            weightwire::rendezvous::detail::check_wait(until, stop, "staging", where());
            const auto& from = stream.next()->tensor;
            if (from.byte_size() != 0) {
                weightwire::copy_tensor({to, from.type(), from.extents()}, from);
            }
            to += (from.byte_size() + 7) / 8 * 8;
            if (info_.script != nullptr && info_.script->fails_in == static_cast<int>(part)) {
                throw weightwire::resource_error{"this rank stages nothing", where()};
            }
        }
        note("read " + std::to_string(part));
        read_ = part + 1;
    }

    staged_init_info info_;
    const weightwire::manifest* parameters_ = nullptr;
    weightwire::shm::segment memory_;
    std::uint64_t slot_bytes_ = 0;
    std::vector<weightwire::update_part> parts_;
    std::uint64_t round_ = 0;
    std::size_t read_ = 0;  ///< parts
    bool alone_ = true;
};

class dropping_staged_sender : public staged_sender {
public:
    using staged_sender::staged_sender;
    void drop_peer(std::size_t) noexcept {}
    void restore_peer(std::size_t) {}
};

/// Reads its trainer rank's memory where the update call says that it is staged.
class staged_receiver {
public:
    explicit staged_receiver(const weightwire::receiver_context& context, const staged& tag = {})
        : context_{context}, tag_{tag} {}

    void open(const weightwire::transport_open& init, weightwire::deadline, std::stop_token) {
        namespace wire = weightwire::wire;
        const wire::json_document parameters{init.wire_parameters, "staged parameters",
                                             weightwire::phase::init};
        parameters.root().allow_only({});
        const wire::json_document transport{init.transport, "staged transport",
                                            weightwire::phase::init};
        transport.root().allow_only({"slot_bytes", "regions"});
        slot_bytes_ = static_cast<std::uint64_t>(
            transport.root().at("slot_bytes").integer(1, std::int64_t{1} << 40U));
        std::vector<std::string> regions;
        for (const auto one : transport.root().at("regions").items()) {
            regions.emplace_back(one.string(200));
        }
        if (regions.empty()) {
            throw weightwire::protocol_error{"no trainer rank exports memory"};
        }
        const auto& mine =
            regions[static_cast<std::size_t>(context_.global_rank - 1) % regions.size()];
        long long pid = 0;
        long long fd = 0;
        unsigned long long start = 0;
        unsigned long long length = 0;
        if (std::sscanf(mine.c_str(), "%lld %lld %llu %llu", &pid, &fd, &start, &length) != 4 ||
            length < 2 * slot_bytes_) {
            throw weightwire::protocol_error{"a trainer rank exports what is no memory"};
        }
        memory_ = weightwire::shm::mapping::open(
            {.pid = pid, .fd = fd, .start_time = start, .offset = 0, .length = length},
            {.resolve_locally = false});
    }
    void receive(const weightwire::update_message& message, weightwire::update_target& target,
                 weightwire::deadline until, std::stop_token) {
        if (!memory_) {
            throw weightwire::session_error{"nothing was opened; init comes first"};
        }
        note("receive " + std::to_string(message.part));
        if (tag_.refused != nullptr && *tag_.refused == message.round) {
            throw weightwire::resource_error{"this worker takes nothing"};
        }
        auto at = message.part % 2 * slot_bytes_;
        for (std::size_t i = 0; i < target.size(); ++i) {
            const auto& parameter = target.parameter(i);
            const auto to = target.open(i, until);
            if (to.data() != nullptr && parameter.byte_size() != 0) {
                weightwire::copy_tensor(
                    to,
                    weightwire::tensor_view{memory_.data() + at, parameter.dtype, parameter.shape});
            }
            target.wrote(i, 0, parameter.byte_size(), until);
            at += (parameter.byte_size() + 7) / 8 * 8;
        }
        note("received " + std::to_string(message.part));
    }
    void release() noexcept { memory_.reset(); }

private:
    void note(const std::string& what) const {
        if (tag_.log != nullptr) {
            tag_.log->note("worker: " + what);
        }
    }

    weightwire::receiver_context context_;
    staged tag_;
    weightwire::shm::mapping memory_;
    std::uint64_t slot_bytes_ = 0;
};

}  // namespace tests

template <>
struct weightwire::backend_traits<tests::staged> {
    static constexpr std::string_view wire_name = "staged";
    static constexpr transport_capabilities capabilities{.host_memory = true, .one_sided = true};
    using init_info = tests::staged_init_info;
    using sender = tests::staged_sender;
    using receiver = tests::staged_receiver;
};
template <>
struct weightwire::backend_traits<tests::dropping_staged>
    : weightwire::backend_traits<tests::staged> {
    static constexpr transport_capabilities capabilities{
        .host_memory = true, .one_sided = true, .drops_peers = true};
    using init_info = tests::dropping_staged_init_info;
    using sender = tests::dropping_staged_sender;
};
static_assert(weightwire::explain_transport<tests::staged>() &&
              weightwire::explain_transport<tests::dropping_staged>());
static_assert(weightwire::HasRankExports<tests::staged_sender> &&
              !weightwire::HasDropPeer<tests::staged_sender> &&
              weightwire::HasDropPeer<tests::dropping_staged_sender>);
