// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/event_sink.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/concepts/update_target.hpp>
#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/convert.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/engine/rank_session.hpp>
#include <weightwire/engine/worker_engine.hpp>
#include <weightwire/sinks/parameter_table.hpp>
#include <weightwire/testing/loopback_transport.hpp>

#include "../support/small_model.hpp"
#include "../support/worker_rig.hpp"

using namespace weightwire;

namespace tests {

/// The loopback with a receiver that converts.
struct converting_loopback {};

/// Gathers each tensor as the trainer has it, then writes it as the worker wants it.
class converting_receiver {
public:
    explicit converting_receiver(const receiver_context& context) : inner_{context} {}
    void open(const transport_open& init, deadline until, std::stop_token stop) {
        inner_.open(init, until, std::move(stop));
        parameters_ = init.parameters;
    }
    void receive(const update_message& message, update_target& target, deadline until,
                 std::stop_token stop) {
        gathering state{&target, {}, {}};
        update_target gathered{state, *parameters_, message.first, message.count};
        inner_.receive(message, gathered, until, std::move(stop));
    }
    void release() noexcept { inner_.release(); }

private:
    struct gathering {
        mutable_tensor_view open(std::size_t i, deadline) {
            const auto& sent = target->parameter(i);
            bytes.assign(sent.byte_size(), {});
            from = {bytes.data(), sent.dtype, sent.shape};
            return {bytes.data(), sent.dtype, sent.shape};
        }
        void wrote(std::size_t i, std::uint64_t offset, std::uint64_t count, deadline until) {
            if (offset + count == bytes.size()) {
                if (const auto to = target->open(i, until); to.data() != nullptr) {
                    convert_tensor(to, from);
                }
            }
            target->wrote(i, offset, count, until);
        }
        update_target* target;
        std::vector<std::byte> bytes;
        tensor_view from;
    };

    testing::loopback_receiver inner_;
    const manifest* parameters_ = nullptr;
};

/// A sink that shows its destinations, in bf16, only around their writes.
class bouncing_sink {
public:
    explicit bouncing_sink(dtype held) : held_{held} {}
    std::span<const destination> begin(const session_info&, const manifest& parameters, deadline) {
        parameters_ = &parameters;
        destinations_.assign(parameters.size(), destination{});
        return destinations_;
    }
    mutable_tensor_view open_destination(std::size_t i, deadline) {
        bytes_.resize(1024);
        return {bytes_.data(), held_, (*parameters_)[i].shape};
    }
    void placed(std::size_t, deadline) {}
    void group_complete(std::size_t) {}
    void prepare(deadline) {}
    void commit(weight_version) noexcept {}
    void rollback() noexcept {}
    weight_version version() const { return 0; }
    bool dirty() const { return false; }

private:
    dtype held_;
    const manifest* parameters_ = nullptr;
    std::vector<destination> destinations_;
    std::vector<std::byte> bytes_;
};
static_assert(WeightSink<bouncing_sink> && HasBouncedDestinations<bouncing_sink>);

}  // namespace tests

template <>
struct weightwire::backend_traits<tests::converting_loopback> {
    static constexpr std::string_view wire_name = "loopback";
    static constexpr transport_capabilities capabilities{.host_memory = true, .converts = true};
    using init_info = testing::loopback_init_info;
    using sender = testing::loopback_sender;
    using receiver = tests::converting_receiver;
};

namespace {

std::vector<param_meta> in_dtype(std::vector<param_meta> parameters, std::size_t first,
                                 dtype type) {
    for (std::size_t i = first; i < parameters.size(); ++i) {
        parameters[i].dtype = type;
    }
    return parameters;
}

/// Whether a table holds what `weights` convert to.
bool holds(const parameter_table& table, const snapshot& live,
           const tests::small_weights& weights) {
    bool same = true;
    for (std::size_t i = 0; i < weights.metadata().size(); ++i) {
        const auto& from = weights.weights()[i].tensor;
        const auto& held = table.parameters()[i];
        std::vector<std::byte> expected(held.byte_size());
        convert_tensor({expected.data(), held.dtype, held.shape}, from);
        const auto found = live.tensor(i).bytes();
        same = same && std::equal(found.begin(), found.end(), expected.begin(), expected.end());
    }
    return same;
}

struct told_texts {
    std::vector<std::string>* texts;
    void on(const event& what) noexcept {
        if (what.kind == event_kind::chosen) {
            texts->emplace_back(what.text);
        }
    }
};

}  // namespace

TEST_CASE("A worker in bf16 takes the f32 weights of a trainer, and leaves their digests out") {
    tests::small_weights weights{6, 1000};
    std::vector<std::string> texts;
    // The first two parameters stay what they are: their digests are compared.
    parameter_table table{manifest{in_dtype(weights.metadata(), 2, dtype::bf16)},
                          {.convert_dtypes = true}};
    worker_engine<tests::converting_loopback, parameter_table, told_texts> engine{
        tests::converting_loopback{}, {&table}, {.events = {&texts}}};
    tests::trainer_half<tests::converting_loopback> trainer{weights, 1, {.verify = true}};
    trainer.epoch = engine.init(trainer.init_message(), {}).epoch;
    for (std::uint64_t version = 1; version <= 3; ++version) {
        weights.set(version);
        trainer.session = engine.start(trainer.start_message(version), {}).session;
        std::uint64_t bytes = 0;
        trainer.beside_sending([&] { bytes = engine.update(trainer.update_message(), {}).bytes; });
        CHECK(bytes == 6 * 1000 * sizeof(float));  // as the trainer counts them
        const auto finish = trainer.finish_message(version);
        REQUIRE(finish.digests.size() == 6);
        engine.finish(finish, {});
        const auto live = table.acquire();
        CHECK(live.version() == version);
        CHECK(holds(table, live, weights));
    }
    const auto said = std::count_if(texts.begin(), texts.end(), [](const std::string& text) {
        return text.find("4 of 6 parameters are converted") != std::string::npos &&
               text.find("not compared with the trainer's digests") != std::string::npos;
    });
    CHECK(said == 1);

    // Verification still sees a parameter that came as it is.
    trainer.session = engine.start(trainer.start_message(4), {}).session;
    trainer.beside_sending([&] { engine.update(trainer.update_message(), {}); });
    auto wrong = trainer.finish_message(4);
    wrong.digests[1] ^= 1U;
    CHECK_THROWS_AS(engine.finish(wrong, {}), integrity_error);
    CHECK(table.version() == 3);
}

TEST_CASE("A backend that moves bytes as they are is given no destination of another dtype") {
    tests::small_weights weights{2, 100};
    const auto refused = [&](parameter_table_options options) -> std::string {
        parameter_table table{manifest{in_dtype(weights.metadata(), 1, dtype::bf16)},
                              std::move(options)};
        worker_engine<testing::loopback, parameter_table> engine{testing::loopback{}, {&table}, {}};
        tests::hand_driven_trainer trainer{weights};
        try {
            static_cast<void>(engine.init(trainer.init_message(), {}));
        } catch (const error& failure) {
            return failure.what();
        }
        return {};
    };
    // At init already, where the sink says what it holds.
    const auto converting = refused({.convert_dtypes = true});
    CHECK(converting.find("mismatch") == 0);
    CHECK(converting.find("[backend loopback]") != std::string::npos);
    CHECK(converting.find("sends float32, the worker holds bfloat16") != std::string::npos);
    CHECK(converting.find(weights.metadata()[1].name) != std::string::npos);
    CHECK(refused({}).find("coverage") == 0);
}

TEST_CASE("A sink's destination of another dtype is refused at the start, equal sizes or not") {
    const manifest session{{{"a", dtype::f16, {8}}}};
    parameter_table table{std::vector<param_meta>{{"a", dtype::bf16, {8}}},
                          {.convert_dtypes = true}};
    const detail::session_list list{session};
    detail::rank_session<parameter_table> strict{table,
                                                 detail::conversion_rule::of<testing::loopback>()};
    try {
        strict.begin({.version = 1}, list, tests::soon(), {});
        FAIL("it began");
    } catch (const mismatch_error& failure) {
        CHECK(failure.context().tensor == "a");
        CHECK(failure.context().phase == phase::start);
        CHECK(failure.text().find("float16") != std::string::npos);
        CHECK(failure.text().find("bfloat16") != std::string::npos);
    }
    strict.rollback();
    detail::rank_session<parameter_table> converting{
        table, detail::conversion_rule::of<tests::converting_loopback>()};
    converting.begin({.version = 1}, list, tests::soon(), {});
    CHECK(converting.converted() == 1);
    converting.wrote(0, 0, 16, tests::soon());
    CHECK_NOTHROW(converting.complete(std::vector<std::uint64_t>{1}, tests::soon(), {}));
    converting.rollback();
}

TEST_CASE("A bounced destination is looked at when it is opened") {
    const manifest session{{{"a", dtype::f32, {8}}, {"b", dtype::f32, {8}}}};
    const detail::session_list list{session};
    const std::vector<std::uint64_t> digests{1, 2};
    const auto converting = detail::conversion_rule::of<tests::converting_loopback>();

    tests::bouncing_sink narrow{dtype::bf16};
    detail::rank_session<tests::bouncing_sink> refused{
        narrow, detail::conversion_rule::of<testing::loopback>()};
    refused.begin({.version = 1}, list, tests::soon(), {});
    CHECK_THROWS_AS(static_cast<void>(refused.open(0, tests::soon())), mismatch_error);

    tests::bouncing_sink integers{dtype::i32};
    detail::rank_session<tests::bouncing_sink> never{integers, converting};
    never.begin({.version = 1}, list, tests::soon(), {});
    CHECK_THROWS_AS(static_cast<void>(never.open(0, tests::soon())), mismatch_error);

    detail::rank_session<tests::bouncing_sink> taken{narrow, converting};
    taken.begin({.version = 1}, list, tests::soon(), {});
    for (std::size_t i = 0; i < 2; ++i) {
        CHECK(taken.open(i, tests::soon()).type() == dtype::bf16);
        taken.wrote(i, 0, 32, tests::soon());
    }
    CHECK(taken.converted() == 2);
    CHECK_NOTHROW(taken.complete(digests, tests::soon(), {}));

    // Of the trainer's own dtype the digests count.
    tests::bouncing_sink same{dtype::f32};
    detail::rank_session<tests::bouncing_sink> compared{same, converting};
    compared.begin({.version = 1}, list, tests::soon(), {});
    for (std::size_t i = 0; i < 2; ++i) {
        static_cast<void>(compared.open(i, tests::soon()));
        compared.wrote(i, 0, 32, tests::soon());
    }
    CHECK(compared.converted() == 0);
    CHECK_THROWS_AS(compared.complete(digests, tests::soon(), {}), integrity_error);
}

TEST_CASE("An alias that is sent in another dtype than its owner is not compared") {
    const manifest session{{{"a", dtype::f32, {4}}, {"tied", dtype::bf16, {4}}}};
    parameter_table table{std::vector<param_meta>{{"a", dtype::f32, {4}}},
                          {.aliases = {{"tied", "a"}}, .convert_dtypes = true}};
    const detail::session_list list{session};
    detail::rank_session<parameter_table> rank{table};
    rank.begin({.version = 1}, list, tests::soon(), {});
    const auto to = rank.open(0, tests::soon());
    std::memset(to.data(), 0, to.byte_size());
    rank.wrote(0, 0, 16, tests::soon());
    rank.wrote(1, 0, 8, tests::soon());
    CHECK(rank.converted() == 0);
    const std::vector<std::uint64_t> digests{digest(std::vector<std::byte>(16)), 7};
    CHECK_NOTHROW(rank.complete(digests, tests::soon(), {}));
    rank.rollback();
}
