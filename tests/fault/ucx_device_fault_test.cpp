// SPDX-License-Identifier: Apache-2.0
//
// The UCX fabric of device memory between processes, over a machinery without a GPU: owners and
// readers that are killed or stopped in a read, and devices that do not end what they began.

#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>

#include "../support/fabric_processes.hpp"
#include "../support/forked.hpp"
#include "../support/host_device_machinery.hpp"

namespace {

using namespace std::chrono_literals;
using clock_type = std::chrono::steady_clock;
using fabric = tests::host_device_fabric;
using tests::host_allocation;
using tests::host_device_world;
using tests::host_ipc_world;
using tests::fabric_processes::in_a_minute;
using tests::fabric_processes::kind_of_error;
using tests::fabric_processes::make_model;
using weightwire::deadline;
using exported_memory = tests::fabric_processes::exported;

constexpr std::uint64_t model_bytes = 40'000'000;
constexpr std::uint64_t line = 10'000;

/// Changes a process at random: copies take differently long.
void stumble() {
    host_ipc_world::at_step = [](std::string_view step) {
        if (step == "work") {
            static thread_local std::mt19937_64 random{3};
            std::this_thread::sleep_for(std::chrono::microseconds{random() % 300});
        }
    };
}

/// A trainer rank in a process of its own, which packs what a device holds. It packs again at `p`,
/// with another seed; lets its device hang at `h`; and ends at `e`, after which it sends the
/// milliseconds that the end of its owner took.
class owner_process {
public:
    explicit owner_process(std::uint64_t seed, bool near = false)
        : process_{[=](tests::channel& parent) {
              host_device_world::ucx_knows = near;
              auto owner = std::make_unique<fabric::owner>(0);
              const auto arena = owner->allocate(model_bytes);
              const host_allocation source{model_bytes};
              const auto pack = [&](std::uint64_t with) {
                  make_model(source.data(), model_bytes, with);
                  owner->pack(arena.data(), source.data(), line, model_bytes / line, line);
                  owner->settle(in_a_minute(), {});
              };
              pack(seed);
              parent.put_string(owner->address());
              parent.put_string(arena.exported().handle);
              owner->serve(true);
              for (;;) {
                  const char asked = parent.take<char>();
                  if (asked == 'p') {
                      // Passes through the thread that sent the model before. That it was read, a
                      // message between processes said, which the thread sanitizer does not see.
                      static_cast<void>(owner->allocate(line));
                      pack(seed + 1);
                      parent.put('p');
                  } else if (asked == 'h') {
                      host_ipc_world::stuck = true;
                      owner->pack(arena.data(), source.data(), line, 1, line);
                      parent.put('h');
                  } else {
                      break;
                  }
              }
              const auto begin = clock_type::now();
              owner.reset();
              parent.put(
                  std::chrono::duration<double, std::milli>(clock_type::now() - begin).count());
          }} {
        exported.address = process_.to().take_string();
        exported.handle = process_.to().take_string();
    }
    void ask(char what) {
        process_.to().put(what);
        REQUIRE(process_.to().take<char>() == what);
    }
    [[nodiscard]] double end() {
        process_.to().put('e');
        return process_.to().take<double>();
    }
    [[nodiscard]] tests::forked& process() noexcept { return process_; }

    exported_memory exported{};

private:
    tests::forked process_;
};

/// What a worker rank has open. Half of the model is one run, half is lines with gaps.
class reading {
public:
    reading(fabric::reader& reader, const exported_memory& from)
        : reader_{reader},
          connection_{reader.connect(from.address, in_a_minute(), {})},
          memory_{reader.open(connection_, from.handle, model_bytes, in_a_minute(), {})},
          to_{std::make_unique<host_allocation>(2 * model_bytes)} {
        constexpr auto half = model_bytes / 2;
        const std::vector<weightwire::remote_run<fabric::memory>> runs{
            {.from = &memory_, .to = to_->data(), .bytes = half},
            {.from = &memory_,
             .offset = half,
             .to = to_->data() + half,
             .bytes = line,
             .count = half / line,
             .from_step = line,
             .to_step = 2 * line},
        };
        read_ = reader.prepare(runs);
    }
    void start() { reader_.start(read_, 0); }
    void wait(deadline until) { reader_.wait(read_, until, {}); }
    void cancel() { reader_.cancel(read_); }
    [[nodiscard]] bool is(std::uint64_t seed) const {
        std::vector<std::byte> model(model_bytes);
        make_model(model.data(), model_bytes, seed);
        constexpr auto half = model_bytes / 2;
        bool same = std::memcmp(to_->data(), model.data(), half) == 0;
        for (std::uint64_t i = 0; i < half / line; ++i) {
            same = same && std::memcmp(to_->data() + half + 2 * i * line,
                                       model.data() + half + i * line, line) == 0;
        }
        return same;
    }
    [[nodiscard]] std::vector<std::byte> bytes() const {
        return {to_->data(), to_->data() + to_->size()};
    }
    void clear() { std::memset(to_->data(), 0, to_->size()); }
    /// A device that is lost may write there until the process ends.
    void leave_destinations() { static_cast<void>(to_.release()); }
    [[nodiscard]] const fabric::connection& connection() const noexcept { return connection_; }

private:
    fabric::reader& reader_;
    fabric::connection connection_;
    fabric::memory memory_;
    std::unique_ptr<host_allocation> to_;
    fabric::read read_;
};

/// Whose copies take differently long.
template <class Body>
tests::forked reader_process(Body body) {
    return tests::fabric_processes::reader_process(
        [body = std::move(body)](tests::channel& parent) mutable {
            stumble();
            return body(parent);
        });
}

}  // namespace

TEST_CASE(
    "ucx device memory: an owner that is killed in a read is a lost peer, and writes no more") {
    bool near = false;
    SUBCASE("pinned") {}
    SUBCASE("near") { near = true; }
    owner_process owner{1, near};
    owner_process successor{7, near};
    auto worker = reader_process([&](tests::channel& parent) -> std::string {
        host_device_world::ucx_knows = near;
        fabric::reader reader{0};
        reading rounds{reader, owner.exported};
        for (std::uint64_t i = 0; i < 2; ++i) {
            rounds.clear();
            rounds.start();
            rounds.wait(in_a_minute());
            if (!rounds.is(1 + i)) {
                return "differs";
            }
            parent.put('r');
            static_cast<void>(parent.take<char>());
        }
        parent.put('s');
        const auto kind = kind_of_error([&] {
            for (;;) {
                rounds.start();
                rounds.wait(deadline::after(40s));
            }
        });
        if (kind != "peer" || rounds.connection().alive()) {
            return "killed: " + kind;
        }
        const auto then = rounds.bytes();
        reading next{reader, successor.exported};
        next.start();
        next.wait(in_a_minute());
        if (then != rounds.bytes()) {
            return "written after the error";
        }
        return next.is(7) && !reader.lost() ? "done" : "the successor's differs";
    });
    for (int i = 0; i < 2; ++i) {
        REQUIRE(worker.to().take<char>() == 'r');
        owner.ask('p');
        worker.to().put('g');
    }
    REQUIRE(worker.to().take<char>() == 's');
    std::this_thread::sleep_for(15ms);
    owner.process().kill();
    CHECK(worker.to().rest() == "done");
    CHECK(successor.end() < 5000.0);
}

TEST_CASE("ucx device memory: a stopped owner costs the deadline, and a cancel writes no more") {
    owner_process owner{3};
    auto worker = reader_process([&](tests::channel& parent) -> std::string {
        fabric::reader reader{0};
        {
            reading rounds{reader, owner.exported};
            rounds.start();
            rounds.wait(in_a_minute());
            rounds.start();
            rounds.cancel();  // in flight
            const auto given_up = rounds.bytes();
            std::this_thread::sleep_for(30ms);
            if (given_up != rounds.bytes()) {
                return "written after the cancel";
            }
        }
        reading rounds{reader, owner.exported};
        parent.put('s');
        static_cast<void>(parent.take<char>());
        rounds.start();
        const auto kind = kind_of_error([&] { rounds.wait(deadline::after(500ms)); });
        if (kind != "timeout") {
            return "stopped: " + kind;
        }
        const auto then = rounds.bytes();
        parent.put('t');
        static_cast<void>(parent.take<char>());
        reading next{reader, owner.exported};
        next.start();
        next.wait(in_a_minute());
        if (then != rounds.bytes()) {
            return "written after the deadline";
        }
        return next.is(3) ? "done" : "differs";
    });
    REQUIRE(worker.to().take<char>() == 's');
    owner.process().stop();
    worker.to().put('g');
    REQUIRE(worker.to().take<char>() == 't');
    owner.process().resume();
    worker.to().put('g');
    CHECK(worker.to().rest() == "done");
}

TEST_CASE("ucx device memory: readers that are killed or stopped hold up nobody") {
    owner_process owner{5};
    const auto endless = [&](tests::channel& parent) -> std::string {
        fabric::reader reader{0};
        reading rounds{reader, owner.exported};
        parent.put('s');
        for (;;) {
            rounds.start();
            rounds.wait(in_a_minute());
        }
    };
    for (int i = 0; i < 2; ++i) {
        auto dies = reader_process(endless);
        auto stops = reader_process(endless);
        REQUIRE(dies.to().take<char>() == 's');
        REQUIRE(stops.to().take<char>() == 's');
        std::this_thread::sleep_for(10ms);
        dies.kill();
        stops.stop();
        auto lives = reader_process([&](tests::channel&) -> std::string {
            fabric::reader reader{0};
            reading rounds{reader, owner.exported};
            for (int round = 0; round < 2; ++round) {
                rounds.clear();
                rounds.start();
                rounds.wait(in_a_minute());
                if (!rounds.is(5)) {
                    return "differs";
                }
            }
            return "done";
        });
        CHECK(lives.to().rest() == "done");
    }
    CHECK(owner.end() < 5000.0);
}

TEST_CASE("ucx device memory: a device that hangs is lost, and the end does not wait for it") {
    owner_process owner{6};
    auto worker = reader_process([&](tests::channel& parent) -> std::string {
        auto reader = std::make_unique<fabric::reader>(0);
        auto rounds = std::make_unique<reading>(*reader, owner.exported);
        rounds->start();
        rounds->wait(in_a_minute());
        if (!rounds->is(6) || reader->lost()) {
            return "differs";
        }
        host_ipc_world::stuck = true;
        rounds->start();
        const auto begin = clock_type::now();
        const auto kind = kind_of_error([&] { rounds->wait(deadline::after(300ms)); });
        if (kind != "timeout" || !reader->lost()) {
            return "hung: " + kind;
        }
        rounds->leave_destinations();
        rounds.reset();
        reader.reset();
        const auto took = clock_type::now() - begin;
        parent.put_text(took < 6s ? "done" : "the end waits");
        return "";
    });
    CHECK(worker.to().rest() == "done");
    owner.ask('h');
    const auto took = owner.end();
    CHECK(took > 1000.0);
    CHECK(took < 6000.0);
}
