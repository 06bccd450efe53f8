#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/failure.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/detail/boot_id.hpp>
#include <weightwire/engine/worker_engine.hpp>
#include <weightwire/engine/worker_service.hpp>
#include <weightwire/sinks/parameter_table.hpp>
#include <weightwire/testing/gate.hpp>
#include <weightwire/testing/loopback_transport.hpp>
#include <weightwire/wire/native.hpp>

#include "small_model.hpp"

/// @file
/// A worker's parts without a server, and a trainer's half that a test drives call by call.

namespace tests {

using namespace std::chrono_literals;

/// The one limit of everything that a test waits for.
inline weightwire::deadline soon() { return weightwire::deadline::after(20s); }
inline constexpr std::int64_t budget_ms = 20'000;

/// What `call` throws, as a failure; empty when it returns.
template <class Call>
weightwire::failure caught(Call call) {
    try {
        call();
        return {};
    } catch (...) {
        return weightwire::failure::current(weightwire::phase::none);
    }
}

/// A parameter table that fails where it is told to.
class obstinate_table {
public:
    explicit obstinate_table(std::vector<weightwire::param_meta> parameters,
                             weightwire::parameter_table_options options = {})
        : table_{std::move(parameters), std::move(options)} {}

    bool fails_prepare = false;
    bool fails_group = false;

    auto begin(const weightwire::session_info& session, const weightwire::manifest& parameters,
               weightwire::deadline until) {
        return table_.begin(session, parameters, until);
    }
    void group_complete(std::size_t group) {
        groups.push_back(group);
        if (fails_group) {
            throw weightwire::resource_error{"this rank installs nothing"};
        }
    }
    void prepare(weightwire::deadline until) {
        table_.prepare(until);
        if (fails_prepare) {
            throw weightwire::resource_error{"this rank prepares nothing"};
        }
    }
    void commit(weightwire::weight_version version) noexcept { table_.commit(version); }
    void rollback() noexcept { table_.rollback(); }
    weightwire::weight_version version() const noexcept { return table_.version(); }
    bool dirty() const noexcept { return table_.dirty(); }
    weightwire::commit_mode mode() const noexcept { return table_.mode(); }
    const weightwire::manifest& parameters() const noexcept { return table_.parameters(); }
    auto acquire() { return table_.acquire(); }
    weightwire::parameter_table& table() { return table_; }

    std::vector<std::size_t> groups;

private:
    weightwire::parameter_table table_;
};
static_assert(weightwire::explain_weight_sink<obstinate_table>());

/// The trainer's half over a backend: makes the messages and sends the bytes.
template <class Tag, class Weights = small_weights>
class trainer_half {
    using traits = weightwire::backend_traits<Tag>;

public:
    explicit trainer_half(Weights& weights, int ranks = 1, typename traits::init_info info = {})
        : weights_{&weights},
          info_{std::move(info)},
          parameters_{weights.metadata()},
          ranks_{ranks},
          sender_{info_} {
        peers_.push_back({.name = "worker", .world_size = ranks, .rank_offset = 1, .native = true});
        init_ = sender_.prepare({.parameters = parameters_,
                                 .peers = peers_,
                                 .world_size = ranks + 1,
                                 .lifetime = weightwire::tensor_lifetime::stable});
    }

    [[nodiscard]] weightwire::wire::native_init init_message() const {
        const auto wire_parameters = info_.init_message();
        return {.backend = std::string{traits::wire_name},
                .rank_offset = 1,
                .world_size = ranks_ + 1,
                .plan_hash = weightwire::wire::plan_hash(traits::wire_name, ranks_ + 1, parameters_,
                                                         wire_parameters),
                .budget_ms = budget_ms,
                .parameters = parameters_,
                .wire_parameters = wire_parameters,
                .transport = init_.front().native};
    }
    [[nodiscard]] const std::string& vllm_init() const {
        return init_.front().vllm.front().init_info;
    }
    [[nodiscard]] auto parts() const { return sender_.parts(); }
    [[nodiscard]] const weightwire::manifest& parameters() const { return parameters_; }

    [[nodiscard]] weightwire::wire::native_start start_message(std::uint64_t version) const {
        return {.epoch = epoch, .version = version, .budget_ms = budget_ms, .answer_ms = budget_ms};
    }
    [[nodiscard]] weightwire::wire::native_update update_message() const {
        return {.epoch = epoch,
                .session = session,
                .plan_hash = init_message().plan_hash,
                .round = round,
                .budget_ms = budget_ms,
                .count = parameters_.size()};
    }
    [[nodiscard]] weightwire::wire::native_finish finish_message(std::uint64_t version) const {
        const auto digests = sender_.digests();
        return {.epoch = epoch,
                .session = session,
                .version = version,
                .budget_ms = budget_ms,
                .boot_id = weightwire::detail::boot_id(),
                .commit_before_ns = weightwire::detail::monotonic_ns(soon().when()),
                .digests = {digests.begin(), digests.end()}};
    }

    /// Runs `update` while this side sends the round's parts on another thread. What sending throws
    /// is dropped: the test looks at the worker.
    template <class Update>
    void beside_sending(Update update) {
        ++round;
        std::thread side{[this, current = round] {
            try {
                weightwire::round_of<Weights> all{*weights_, parameters_};
                auto stream = all.stream();
                for (std::size_t part = 0; part < sender_.parts().size(); ++part) {
                    sender_.send(current, part, stream, soon(), {});
                }
            } catch (const weightwire::error&) {
            }
        }};
        try {
            update();
        } catch (...) {
            hang_up();
            side.join();
            throw;
        }
        side.join();
    }

    /// The trainer's connections end, as when it dies.
    void hang_up() { sender_.drop_peer(0); }

    std::uint64_t epoch = 0;
    std::uint64_t session = 0;
    std::uint64_t round = 0;

private:
    Weights* weights_;
    typename traits::init_info info_;
    weightwire::manifest parameters_;
    int ranks_;
    std::vector<weightwire::peer_info> peers_;
    typename traits::sender sender_;
    std::vector<weightwire::transport_init> init_;
};

using hand_driven_trainer = trainer_half<weightwire::testing::loopback>;

/// A worker of several ranks with its sinks, engine and service.
template <class Sink = obstinate_table, class Tag = weightwire::testing::loopback>
struct worker_rig {
    using engine_type = weightwire::worker_engine<Tag, Sink>;

    explicit worker_rig(const std::vector<weightwire::param_meta>& parameters, int ranks = 1,
                        weightwire::parameter_table_options table = {},
                        weightwire::worker_options<> options = {})
        : sinks{make(parameters, ranks, table)},
          engine{Tag{}, pointers(sinks), options},
          service{engine} {}

    /// What every rank serves: the version, and whether the bytes are those of `weights`.
    [[nodiscard]] bool serves(std::uint64_t version, const small_weights& weights) {
        for (auto& sink : sinks) {
            const auto held = sink->acquire();
            bool same = held.version() == version;
            for (std::size_t i = 0; i < weights.metadata().size(); ++i) {
                const auto tensor = sink->table().acquire().find(weights.metadata()[i].name);
                same = same && tensor &&
                       weightwire::digest_text(weightwire::digest(tensor->bytes())) ==
                           weights.digest_of(i);
            }
            if (!same) {
                return false;
            }
        }
        return true;
    }
    /// One whole native round.
    void round(trainer_half<Tag>& trainer, std::uint64_t version) {
        trainer.session = engine.start(trainer.start_message(version), {}).session;
        trainer.beside_sending([&] { engine.update(trainer.update_message(), {}); });
        engine.finish(trainer.finish_message(version), {});
    }
    void init(trainer_half<Tag>& trainer) {
        trainer.epoch = engine.init(trainer.init_message(), {}).epoch;
    }

    std::vector<std::unique_ptr<Sink>> sinks;
    engine_type engine;
    weightwire::worker_service<engine_type> service;

private:
    static auto make(const std::vector<weightwire::param_meta>& parameters, int ranks,
                     const weightwire::parameter_table_options& table) {
        std::vector<std::unique_ptr<Sink>> made;
        for (int rank = 0; rank < ranks; ++rank) {
            made.push_back(std::make_unique<Sink>(parameters, table));
        }
        return made;
    }
    static auto pointers(const std::vector<std::unique_ptr<Sink>>& sinks) {
        std::vector<Sink*> out;
        for (const auto& sink : sinks) {
            out.push_back(sink.get());
        }
        return out;
    }
};

/// Weights, a worker that expects them and a trainer that sends them, initialized.
template <class Sink = obstinate_table>
struct scene {
    explicit scene(int ranks = 1, weightwire::parameter_table_options table = {},
                   weightwire::testing::loopback_init_info info = {},
                   weightwire::worker_options<> options = {})
        : weights{6, 1000},
          rig{weights.metadata(), ranks, std::move(table), options},
          trainer{weights, ranks, std::move(info)} {
        rig.init(trainer);
    }
    void round(std::uint64_t version) {
        weights.set(version);
        rig.round(trainer, version);
    }
    void start(std::uint64_t version) {
        trainer.session = rig.engine.start(trainer.start_message(version), {}).session;
    }
    void update() {
        trainer.beside_sending([&] { rig.engine.update(trainer.update_message(), {}); });
    }

    small_weights weights;
    worker_rig<Sink> rig;
    hand_driven_trainer trainer;
};

}  // namespace tests
