// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include <weightwire/backends/ipc/backend.hpp>

#include "../support/allocations.hpp"
#include "../support/worker_rig.hpp"

using namespace weightwire;
using namespace tests;

namespace {

/// Remembers how much its thread had allocated when the last layer was whole: that is the last
/// byte.
class counting_table : public obstinate_table {
public:
    using obstinate_table::obstinate_table;
    void group_complete(std::size_t) {
        if (++complete == wanted) {
            at_last_byte = weightwire_tests::allocations();
        }
    }
    std::size_t complete = 0;
    std::size_t wanted = 0;
    std::uint64_t at_last_byte = 0;
};

/// Allocations from the update's arrival to its last byte, in each of five rounds.
template <class Tag>
std::vector<std::uint64_t> counted_rounds(typename backend_traits<Tag>::init_info info) {
    constexpr int layers = 20;
    small_weights weights{2 * layers, 3000};
    worker_rig<counting_table, Tag> rig{weights.metadata()};
    trainer_half<Tag> trainer{weights, 1, std::move(info)};
    rig.init(trainer);
    auto& sink = *rig.sinks[0];
    std::vector<std::uint64_t> counts;
    for (std::uint64_t version = 1; version <= 5; ++version) {
        weights.set(version);
        trainer.session = rig.engine.start(trainer.start_message(version), {}).session;
        sink.complete = 0;
        sink.wanted = layers;
        trainer.beside_sending([&] {
            const auto body = wire::encode(trainer.update_message());
            const http_request request{.method = "POST",
                                       .path = "/update_weights",
                                       .content_type = wire::native_content_type,
                                       .body = {body.data(), body.size()}};
            const auto before = weightwire_tests::allocations();
            const auto response = rig.service.handle(request);
            CHECK(response.status == 200);
            CHECK(sink.complete == layers);
            counts.push_back(sink.at_last_byte - before);
        });
        rig.engine.finish(trainer.finish_message(version), {});
        CHECK(rig.serves(version, weights));
    }
    return counts;
}

}  // namespace

TEST_CASE("From the third round on nothing is allocated until the last byte is in place") {
    SUBCASE("loopback") {
        const auto counts = counted_rounds<testing::loopback>({});
        for (std::size_t round = 2; round < counts.size(); ++round) {
            CHECK(counts[round] == 0);
        }
    }
    SUBCASE("ipc, tensor by tensor") {
        const auto counts = counted_rounds<ipc::backend>({.verify = true});
        for (std::size_t round = 2; round < counts.size(); ++round) {
            CHECK(counts[round] == 0);
        }
    }
    SUBCASE("ipc, packed") {
        const auto counts = counted_rounds<ipc::backend>(
            {.packed = true, .packed_buffer_size_bytes = 1U << 16U, .verify = true});
        for (std::size_t round = 2; round < counts.size(); ++round) {
            CHECK(counts[round] == 0);
        }
    }
}

TEST_CASE("The count sees an allocation that a round makes" *
          doctest::skip(!weightwire_tests::counts_allocations)) {
    const weightwire_tests::allocation_watch watch;
    const std::vector<int> made(100);
    CHECK(made.size() == 100);
    CHECK(watch.count() > 0);
}
