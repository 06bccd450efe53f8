// SPDX-License-Identifier: Apache-2.0
// A table over a memory that is no host memory: what a device table does, without a device.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>
#include <weightwire/engine/rank_devices.hpp>
#include <weightwire/engine/worker_engine.hpp>
#include <weightwire/engine/worker_service.hpp>
#include <weightwire/sinks/basic_parameter_table.hpp>
#include <weightwire/sinks/parameter_table.hpp>

#include "../support/worker_rig.hpp"
#include "sink_test_support.hpp"

using namespace weightwire;
using namespace std::chrono_literals;
using sink_test::bytes_of;
using sink_test::holds;
using sink_test::pattern;
using sink_test::prepare;
using sink_test::update;
using tests::soon;

namespace {

/// What a test sees of a memory, and how it makes it fail. Outlives the table.
struct memory_notes {
    std::size_t plans = 0;
    std::size_t exchanges = 0;
    std::size_t digested = 0;
    std::size_t cleared = 0;
    std::stop_source* stop_in_exchange = nullptr;
    bool fails_exchange = false;
    bool fails_back = false;
};

/// Host memory that says it is CUDA device 2, and moves as a device does: all at once, not to be
/// interrupted, and perhaps not at all.
class pretended_memory {
public:
    using storage = host_storage;

    explicit pretended_memory(memory_notes& notes, device where = {memory_kind::cuda, 2})
        : notes_{&notes}, where_{where} {}
    [[nodiscard]] device where() const noexcept { return where_; }
    [[nodiscard]] storage allocate(std::uint64_t bytes, std::string_view purpose) const {
        return host_storage{bytes, purpose};
    }
    void require_loadable(const named_tensor&) const {}
    void load(const mutable_tensor_view& to, const named_tensor& from) const {
        copy_tensor(to, from.tensor);
    }
    void plan(const detail::placed_parameters&) { ++notes_->plans; }
    [[nodiscard]] detail::timed_copy sample(const detail::placed_parameters&) const noexcept {
        return {1U << 20U, 1ms};
    }
    [[nodiscard]] bool exchange(const detail::placed_parameters& placed,
                                detail::exchange_pace& pace) const {
        if (pace(static_cast<std::size_t>(placed.bytes())) == 0) {
            return false;
        }
        if (notes_->fails_exchange) {
            throw resource_error{"the device is lost"};
        }
        swap(placed);
        if (notes_->stop_in_exchange != nullptr) {
            notes_->stop_in_exchange->request_stop();
        }
        return true;
    }
    [[nodiscard]] bool exchange_back(const detail::placed_parameters& placed,
                                     std::uint64_t bytes) const noexcept {
        return bytes == 0 || publish(placed);
    }
    [[nodiscard]] bool publish(const detail::placed_parameters& placed) const noexcept {
        if (!notes_->fails_back) {
            swap(placed);
        }
        return !notes_->fails_back;
    }
    void digests(std::span<const tensor_view> tensors, std::span<std::uint64_t> results,
                 deadline until, const std::stop_token&) const {
        if (until.expired()) {
            throw timeout_error{"no digests in time"};
        }
        for (std::size_t i = 0; i < tensors.size(); ++i) {
            results[i] = digest(bytes_of(tensors[i]));
        }
        notes_->digested += tensors.size();
    }
    void clear(const mutable_tensor_view& tensor) const {
        std::fill_n(tensor.data(), tensor.byte_size(), std::byte{0});
        ++notes_->cleared;
    }

private:
    void swap(const detail::placed_parameters& placed) const noexcept {
        ++notes_->exchanges;
        placed.all([](const detail::parameter_slots& slots) {
            auto everything = detail::first_bytes{UINT64_MAX};
            return exchange_tensors(slots[0], slots[1], everything);
        });
    }
    memory_notes* notes_;
    device where_;
};

using pretended_table = basic_parameter_table<pretended_memory>;
static_assert(TableMemory<pretended_memory> && ComputesDigests<pretended_memory> &&
              ClearsTensors<pretended_memory>);
static_assert(WeightSink<pretended_table> && HasSnapshots<pretended_table>);
static_assert(HasTensorDigests<pretended_table> && HasTensorClear<pretended_table>);
static_assert(HasDevice<pretended_table> && HasDevice<parameter_table>);
static_assert(!HasTensorDigests<parameter_table> && !HasTensorClear<parameter_table>);
static_assert(!ComputesDigests<host_memory> && !ClearsTensors<host_memory>);

constexpr commit_mode all_modes[]{commit_mode::flip, commit_mode::copy_in, commit_mode::in_place};

manifest model() {
    return manifest{{{"layers.0.w", dtype::f32, {16, 8}},
                     {"layers.1.w", dtype::bf16, {3}},
                     {"nothing", dtype::f32, {0}}}};
}

}  // namespace

TEST_CASE("a table gives tensors of its memory's device in every mode") {
    for (const auto mode : all_modes) {
        CAPTURE(to_string(mode));
        memory_notes notes;
        pretended_table table{model(), pretended_memory{notes}, {.mode = mode}};
        CHECK(table.device() == device{memory_kind::cuda, 2});
        for (weight_version version = 1; version <= 4; ++version) {
            update(table, version);
            CHECK(holds(table, version));
        }
        for (const auto& each :
             table.begin({.epoch = 1, .session = 5, .version = 5}, table.parameters(), soon())) {
            CHECK(each.where.device() == table.device());
        }
        table.rollback();
        CHECK(table.dirty() == (mode == commit_mode::in_place));
        CHECK((notes.plans != 0) == (mode == commit_mode::copy_in));
    }
}

TEST_CASE("a table over the user's memory takes that of its own device only") {
    memory_notes notes;
    std::vector<std::byte> bytes(64);
    const auto at = [&](device where) {
        return std::vector<user_parameter>{{"w", {bytes.data(), dtype::f32, {16}, where}}};
    };
    const device own{memory_kind::cuda, 2};
    for (const auto mode : {commit_mode::copy_in, commit_mode::in_place}) {
        auto table = pretended_table::over(at(own), pretended_memory{notes}, {.mode = mode});
        update(table, 1);
        CHECK(bytes == pattern(1, "w", 64));
    }
    CHECK_THROWS_WITH_AS(static_cast<void>(pretended_table::over(at({}), pretended_memory{notes})),
                         doctest::Contains("CUDA device 2"), unsupported_error);
    CHECK_THROWS_AS(static_cast<void>(
                        pretended_table::over(at({memory_kind::cuda, 1}), pretended_memory{notes})),
                    unsupported_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(parameter_table::over(at(own))),
                         doctest::Contains("host memory only"), unsupported_error);
}

TEST_CASE("device memory in too many runs is refused by name") {
    memory_notes notes;
    constexpr std::int64_t side = 1025;
    std::vector<std::byte> bytes(side * side);
    const device own{memory_kind::cuda, 2};
    const std::vector<user_parameter> transposed{
        {"w",
         {bytes.data(), dtype::u8, {side, side}, mutable_tensor_view::strides_type{1, side}, own}}};
    try {
        static_cast<void>(pretended_table::over(transposed, pretended_memory{notes}));
        FAIL("more runs than a device can exchange were taken");
    } catch (const unsupported_error& refused) {
        CHECK(refused.context().tensor == "w");
    }
}

TEST_CASE("an exchange that cannot be interrupted is swapped back when it was late") {
    memory_notes notes;
    pretended_table table{model(), pretended_memory{notes}, {.mode = commit_mode::copy_in}};
    update(table, 1);
    prepare(table, 2);
    notes.exchanges = 0;
    CHECK_THROWS_AS(table.exchange(deadline::after(-1s)), timeout_error);
    CHECK(notes.exchanges == 0);  // the clock is asked before the launch
    std::stop_source stop;
    notes.stop_in_exchange = &stop;
    CHECK_THROWS_AS(table.exchange(soon(), stop.get_token()), cancelled_error);
    CHECK(notes.exchanges == 2);
    table.rollback();
    CHECK(holds(table, 1));
    prepare(table, 3);
    table.exchange(soon());
    table.rollback();
    CHECK(holds(table, 1));
    update(table, 4);
    CHECK(holds(table, 4));
}

TEST_CASE("a memory that loses bytes makes the table dirty until a full commit") {
    for (int where = 0; where < 3; ++where) {
        CAPTURE(where);
        memory_notes notes;
        pretended_table table{model(), pretended_memory{notes}, {.mode = commit_mode::copy_in}};
        update(table, 1);
        prepare(table, 2);
        if (where == 0) {
            notes.fails_exchange = true;
            CHECK_THROWS_AS(table.exchange(soon()), resource_error);
            table.rollback();
        } else if (where == 1) {
            table.exchange(soon());
            notes.fails_back = true;
            table.rollback();
        } else {
            notes.fails_back = true;
            table.commit(2);
        }
        CHECK(table.dirty());
        CHECK(table.version() == 1);
        CHECK_THROWS_AS(static_cast<void>(table.acquire()), dirty_error);
        notes = {};
        update(table, 3);
        CHECK_FALSE(table.dirty());
        CHECK(holds(table, 3));
    }
}

namespace {

/// A worker over one such table, and its trainer: a loopback receiver writes to host memory only,
/// so that is what the tensors are called here.
struct device_scene {
    explicit device_scene(commit_mode mode)
        : table{manifest{weights.metadata()}, pretended_memory{notes, {}}, {.mode = mode}} {
        trainer.epoch = engine.init(trainer.init_message(), {}).epoch;
    }
    void receive(std::uint64_t version) {
        weights.set(version);
        trainer.session = engine.start(trainer.start_message(version), {}).session;
        trainer.beside_sending([&] { engine.update(trainer.update_message(), {}); });
    }
    nlohmann::json check(std::string_view body) {
        const auto reply = service.handle({.method = "POST",
                                           .path = "/weight_checker",
                                           .content_type = "application/json",
                                           .body = body});
        CHECK(reply.status == 200);
        return nlohmann::json::parse(reply.body);
    }

    memory_notes notes;
    tests::small_weights weights{4, 100};
    pretended_table table;
    worker_engine<testing::loopback, pretended_table> engine{testing::loopback{}, table};
    worker_service<worker_engine<testing::loopback, pretended_table>> service{engine};
    tests::hand_driven_trainer trainer{weights};
};

}  // namespace

TEST_CASE("a worker compares and tells the digests that its sink computes") {
    for (const auto mode : all_modes) {
        CAPTURE(to_string(mode));
        device_scene s{mode};
        s.receive(1);
        s.engine.finish(s.trainer.finish_message(1), {});
        CHECK(s.notes.digested == 4);
        const auto sums = s.check(R"({"action":"checksum"})")["checksums"];
        for (std::size_t i = 0; i < 4; ++i) {
            CHECK(sums[s.weights.metadata()[i].name] == s.weights.digest_of(i));
        }
        s.receive(2);
        auto wrong = s.trainer.finish_message(2);
        wrong.digests[2] ^= 1;
        try {
            s.engine.finish(wrong, {});
            FAIL("a digest that differs was committed");
        } catch (const integrity_error& refused) {
            CHECK(refused.context().tensor == s.weights.metadata()[2].name);
        }
        CHECK(s.engine.version() == 1);
        if (mode != commit_mode::in_place) {
            CHECK(s.check(R"({"action":"checksum"})")["checksums"] == sums);
        }
    }
}

TEST_CASE("a worker resets weights that only its sink can clear") {
    device_scene s{commit_mode::copy_in};
    s.receive(1);
    s.engine.finish(s.trainer.finish_message(1), {});
    s.check(R"({"action":"reset"})");
    CHECK(s.notes.cleared == 4);
    const auto held = s.table.acquire();
    CHECK(held.version() == 1);
    CHECK(bytes_of(held.tensor(3)) == std::vector<std::byte>(400));
}

TEST_CASE("without a sink's own digests a worker says what it cannot read") {
    std::vector<std::byte> bytes(8);
    const tensor_view there{bytes.data(), dtype::u8, {8}, {memory_kind::cuda, 0}};
    CHECK_THROWS_WITH_AS(static_cast<void>(detail::tensor_digest(there)),
                         doctest::Contains("tensor_digests()"), unsupported_error);
}

namespace {

struct deviceless_sink : archetypes::weight_sink {};

}  // namespace

TEST_CASE("a rank's device is the user's choice, else its sink's, else its number") {
    deviceless_sink plain;
    const std::vector<deviceless_sink*> one{&plain};
    const std::vector<deviceless_sink*> three{&plain, &plain, &plain};
    CHECK(detail::rank_devices(one, {}) == std::vector{0});
    CHECK(detail::rank_devices(three, {}) == std::vector{0, 1, 2});
    CHECK(detail::rank_devices(three, std::vector{4, 4, 1}) == std::vector{4, 4, 1});
    CHECK_THROWS_AS(static_cast<void>(detail::rank_devices(three, std::vector{0})), usage_error);
    CHECK_THROWS_AS(static_cast<void>(detail::rank_devices(one, std::vector{-1})), usage_error);

    memory_notes notes;
    pretended_table there{model(), pretended_memory{notes}, {.mode = commit_mode::in_place}};
    const std::vector<pretended_table*> sinks{&there};
    CHECK(detail::rank_devices(sinks, {}) == std::vector{2});
    CHECK(detail::rank_devices(sinks, std::vector{2}) == std::vector{2});
    CHECK_THROWS_WITH_AS(static_cast<void>(detail::rank_devices(sinks, std::vector{1})),
                         doctest::Contains("its sink is on device 2"), usage_error);
    parameter_table host{model()};
    CHECK(detail::rank_devices(std::vector<parameter_table*>{&host, &host}, {}) ==
          std::vector{0, 1});
}

namespace {

/// Loopback whose receivers tell which device they were given.
struct telling_loopback {};
std::vector<int>* told_devices = nullptr;  // written by the thread that calls init
struct telling_receiver : testing::loopback_receiver {
    explicit telling_receiver(const receiver_context& context) : loopback_receiver{context} {
        told_devices->push_back(context.device);
    }
};

}  // namespace

template <>
struct weightwire::backend_traits<telling_loopback>
    : weightwire::backend_traits<testing::loopback> {
    using receiver = telling_receiver;
};

TEST_CASE("each rank's receiver learns its device") {
    std::vector<int> told;
    told_devices = &told;
    tests::small_weights weights{2, 10};
    for (const auto& chosen : {std::vector<int>{}, std::vector{5, 3}}) {
        told.clear();
        tests::worker_rig<tests::obstinate_table, telling_loopback> rig{
            weights.metadata(), 2, {}, {.devices = chosen}};
        tests::trainer_half<telling_loopback> trainer{weights, 2};
        rig.init(trainer);
        CHECK(told == (chosen.empty() ? std::vector{0, 1} : chosen));
    }
}
