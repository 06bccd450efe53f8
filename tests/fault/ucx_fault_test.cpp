// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/descriptor.hpp>
#include <weightwire/fabrics/ucx/fabric.hpp>

#include "../support/fabric_processes.hpp"
#include "../support/forked.hpp"

namespace {

namespace ucx = weightwire::ucx;
using namespace std::chrono_literals;
using clock_type = std::chrono::steady_clock;
using tests::fabric_processes::in_a_minute;
using tests::fabric_processes::kind_of_error;
using tests::fabric_processes::make_model;
using tests::fabric_processes::reader_process;
using weightwire::deadline;
using exported_memory = tests::fabric_processes::exported;

constexpr std::uint64_t ucx_model_bytes = 48'000'000;

std::vector<std::byte> ucx_model(std::uint64_t seed) {
    std::vector<std::byte> made(ucx_model_bytes);
    make_model(made.data(), made.size(), seed);
    return made;
}

/// Puts a process into a network of its own, which it also sees under /sys, where UCX looks.
void leave_network() {
    if (::unshare(CLONE_NEWNET | CLONE_NEWNS) != 0 ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("sysfs", "/sys", "sysfs", 0, nullptr) != 0) {
        throw std::runtime_error{"no network of its own"};
    }
}

/// Waits until the kernel calls the cable of this network plugged in, which takes it a moment.
void await_cable(const char* name) {
    const auto socket =
        weightwire::shm::descriptor::from_native(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    ifreq asked{};
    std::strncpy(asked.ifr_name, name, sizeof asked.ifr_name - 1);
    const auto until = deadline::after(20s);
    while (::ioctl(socket.native_handle(), SIOCGIFFLAGS, &asked) != 0 ||
           (asked.ifr_flags & IFF_RUNNING) == 0) {
        if (until.expired()) {
            throw std::runtime_error{"the virtual pair does not come up"};
        }
        std::this_thread::sleep_for(5ms);
    }
}

/// A trainer rank in a process of its own. It ends when it is sent a character, and then sends the
/// milliseconds that the end of its owner took.
class owner_process {
public:
    explicit owner_process(std::uint64_t seed, bool network = false)
        : process_{[=](tests::channel& parent) {
              if (network) {
                  leave_network();
                  parent.put('n');
                  static_cast<void>(parent.take<char>());
                  await_cable("wwa");
              }
              auto owner = std::make_unique<ucx::fabric::owner>(0);
              const auto arena = owner->allocate(ucx_model_bytes);
              const auto model = ucx_model(seed);
              std::memcpy(arena.data(), model.data(), model.size());
              parent.put_string(owner->address());
              parent.put_string(arena.exported().handle);
              owner->serve(true);
              static_cast<void>(parent.take<char>());
              const auto begin = clock_type::now();
              owner.reset();
              parent.put(
                  std::chrono::duration<double, std::milli>(clock_type::now() - begin).count());
          }} {
        if (!network) {
            meet();
        }
    }
    void meet() {
        exported.address = process_.to().take_string();
        exported.handle = process_.to().take_string();
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

/// What a worker rank has open, and whether a round brings the model.
class reading {
public:
    reading(ucx::fabric::reader& reader, const exported_memory& from, deadline until)
        : reader_{reader},
          connection_{reader.connect(from.address, until, {})},
          memory_{reader.open(connection_, from.handle, ucx_model_bytes, until, {})},
          to_(ucx_model_bytes) {
        // A half straight, a half in rows that are laid out.
        const std::uint64_t half = ucx_model_bytes / 2;
        const std::vector<weightwire::remote_run<ucx::memory>> runs{
            {.from = &memory_, .to = to_.data(), .bytes = half},
            {.from = &memory_,
             .offset = half,
             .to = to_.data() + half,
             .bytes = 12'000,
             .count = half / 12'000,
             .from_step = 12'000,
             .to_step = 12'000},
        };
        auto rows = runs;
        rows[1].count /= 2;
        rows.push_back(rows[1]);
        rows[2].offset += half / 2;
        rows[2].to += half / 2;
        read_ = reader.prepare(rows);
    }
    void start() { reader_.start(read_, 0); }
    void wait(deadline until) { reader_.wait(read_, until, {}); }
    [[nodiscard]] bool is(const std::vector<std::byte>& model) const {
        return std::memcmp(to_.data(), model.data(), to_.size()) == 0;
    }
    [[nodiscard]] std::vector<std::byte>& to() noexcept { return to_; }
    [[nodiscard]] const ucx::fabric::connection& connection() const noexcept { return connection_; }

private:
    ucx::fabric::reader& reader_;
    ucx::fabric::connection connection_;
    ucx::fabric::memory memory_;
    std::vector<std::byte> to_;
    ucx::fabric::read read_;
};

}  // namespace

TEST_CASE("ucx: two processes, and a killed owner is a lost peer well before the deadline") {
    owner_process owner{1};
    owner_process successor{2};
    auto worker = reader_process([&](tests::channel& parent) -> std::string {
        ucx::fabric::reader reader{0};
        const auto model = ucx_model(1);
        reading rounds{reader, owner.exported, in_a_minute()};
        for (int i = 0; i < 3; ++i) {
            rounds.start();
            rounds.wait(in_a_minute());
            if (!rounds.is(model)) {
                return "differs";
            }
            std::memset(rounds.to().data(), 0, rounds.to().size());
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
        // Others go on, in the same reader.
        reading next{reader, successor.exported, in_a_minute()};
        next.start();
        next.wait(in_a_minute());
        return next.is(ucx_model(2)) ? "done" : "the successor's differs";
    });
    REQUIRE(worker.to().take<char>() == 's');
    std::this_thread::sleep_for(15ms);
    owner.process().kill();
    CHECK(worker.to().rest() == "done");
    CHECK(successor.end() < 5000.0);
}

TEST_CASE("ucx: a stopped owner costs the deadline, and writes nothing when it wakes") {
    owner_process owner{3};
    auto worker = reader_process([&](tests::channel& parent) -> std::string {
        ucx::fabric::reader reader{0};
        reading rounds{reader, owner.exported, in_a_minute()};
        parent.put('s');
        static_cast<void>(parent.take<char>());
        rounds.start();
        const auto kind = kind_of_error([&] { rounds.wait(deadline::after(500ms)); });
        if (kind != "timeout") {
            return "stopped: " + kind;
        }
        const auto again = kind_of_error([&] {
            static_cast<void>(reader.connect(owner.exported.address, deadline::after(300ms), {}));
        });
        if (again != "timeout") {
            return "connect to a stopped owner: " + again;
        }
        const auto then = rounds.to();
        parent.put('t');
        static_cast<void>(parent.take<char>());
        // It is awake again; what it still answers goes nowhere.
        reading next{reader, owner.exported, in_a_minute()};
        next.start();
        next.wait(in_a_minute());
        if (rounds.to() != then) {
            return "written after the deadline";
        }
        return next.is(ucx_model(3)) ? "done" : "differs";
    });
    REQUIRE(worker.to().take<char>() == 's');
    owner.process().stop();
    worker.to().put('g');
    REQUIRE(worker.to().take<char>() == 't');
    owner.process().resume();
    worker.to().put('g');
    CHECK(worker.to().rest() == "done");
}

TEST_CASE("ucx: nobody behind an address is a lost peer, at once") {
    owner_process owner{4};
    owner.process().kill();
    auto worker = reader_process([&](tests::channel&) -> std::string {
        ucx::fabric::reader reader{0};
        return kind_of_error([&] {
            static_cast<void>(reader.connect(owner.exported.address, deadline::after(40s), {}));
        });
    });
    CHECK(worker.to().rest() == "peer");
}

TEST_CASE("ucx: readers that are killed or stopped in a read hold up neither others nor the end") {
    owner_process owner{5};
    const auto endless = [&](tests::channel& parent) -> std::string {
        ucx::fabric::reader reader{0};
        reading rounds{reader, owner.exported, in_a_minute()};
        parent.put('s');
        for (;;) {
            rounds.start();
            rounds.wait(in_a_minute());
        }
    };
    for (int i = 0; i < 3; ++i) {
        auto dies = reader_process(endless);
        auto stops = reader_process(endless);
        REQUIRE(dies.to().take<char>() == 's');
        REQUIRE(stops.to().take<char>() == 's');
        std::this_thread::sleep_for(10ms);
        dies.kill();
        stops.stop();
        auto lives = reader_process([&](tests::channel&) -> std::string {
            ucx::fabric::reader reader{0};
            const auto model = ucx_model(5);
            reading rounds{reader, owner.exported, in_a_minute()};
            for (int round = 0; round < 3; ++round) {
                rounds.start();
                rounds.wait(in_a_minute());
                if (!rounds.is(model)) {
                    return "differs";
                }
            }
            return "done";
        });
        CHECK(lives.to().rest() == "done");
    }
    auto stops = reader_process(endless);
    REQUIRE(stops.to().take<char>() == 's');
    stops.stop();
    CHECK(owner.end() < 5000.0);
}

namespace {

/// Whether this process may make networks; in a child, so that it stays in its own.
bool may_make_networks() {
    tests::forked tries{[](tests::channel& parent) {
        leave_network();
        const bool made =
            std::system("ip link add wwa type veth peer name wwb >/dev/null 2>&1") == 0;
        parent.put_text(made ? "yes" : "no veth");
    }};
    return tries.to().rest() == "yes";
}

/// Runs `ip <arguments>` in the network of a process.
bool ip_in(pid_t process, const std::string& arguments) {
    const auto command = "nsenter -t " + std::to_string(process) + " -n ip " + arguments;
    return std::system(command.c_str()) == 0;
}

}  // namespace

TEST_CASE("ucx: between two networks joined by a virtual pair, also when the cable is pulled") {
    if (!may_make_networks()) {
        MESSAGE("skipped: this machine allows no networks of a process's own, or has no `ip`");
        return;
    }
    owner_process owner{6, true};
    REQUIRE(owner.process().to().take<char>() == 'n');
    auto worker = tests::forked{[](tests::channel& parent) {
        leave_network();
        parent.put('n');
        const exported_memory from{.address = parent.take_string(), .handle = parent.take_string()};
        await_cable("wwb");
        ucx::fabric::reader reader{0};
        const auto model = ucx_model(6);
        std::string text = "done";
        {
            reading rounds{reader, from, in_a_minute()};
            for (int i = 0; i < 3 && text == "done"; ++i) {
                std::memset(rounds.to().data(), 0, rounds.to().size());
                rounds.start();
                rounds.wait(in_a_minute());
                text = rounds.is(model) ? "done" : "differs";
            }
            parent.put('s');
            static_cast<void>(parent.take<char>());
            rounds.start();
            const auto pulled = kind_of_error([&] { rounds.wait(deadline::after(500ms)); });
            text = text != "done" || pulled == "timeout" ? text : "pulled: " + pulled;
        }
        const auto nobody = kind_of_error(
            [&] { static_cast<void>(reader.connect(from.address, deadline::after(500ms), {})); });
        text = text != "done" || nobody == "timeout" || nobody == "peer" ? text : "gone: " + nobody;
        parent.put('p');
        static_cast<void>(parent.take<char>());
        if (text == "done") {
            reading rounds{reader, from, in_a_minute()};
            rounds.start();
            rounds.wait(in_a_minute());
            text = rounds.is(model) ? "done" : "differs afterwards";
        }
        parent.put_text(text);
    }};
    REQUIRE(worker.to().take<char>() == 'n');
    const auto here = owner.process().process();
    const auto there = worker.process();
    REQUIRE(ip_in(here, "link add wwa type veth peer name wwb netns " + std::to_string(there)));
    for (const auto& [process, name, address] :
         {std::tuple{here, "wwa", "10.77.0.1/24"}, std::tuple{there, "wwb", "10.77.0.2/24"}}) {
        REQUIRE(ip_in(process, std::string{"addr add "} + address + " dev " + name));
        REQUIRE(ip_in(process, std::string{"link set "} + name + " up"));
        REQUIRE(ip_in(process, "link set lo up"));
    }
    owner.process().to().put('g');
    owner.meet();
    worker.to().put_string(owner.exported.address);
    worker.to().put_string(owner.exported.handle);
    REQUIRE(worker.to().take<char>() == 's');
    REQUIRE(ip_in(here, "link set wwa down"));
    // What is sent is lost without a word, as to a machine that is off.
    REQUIRE(ip_in(there, "neigh replace 10.77.0.1 lladdr 02:00:00:00:00:01 dev wwb nud permanent"));
    worker.to().put('g');
    REQUIRE(worker.to().take<char>() == 'p');
    REQUIRE(ip_in(there, "neigh del 10.77.0.1 dev wwb"));
    REQUIRE(ip_in(here, "link set wwa up"));
    worker.to().put('g');
    CHECK(worker.to().rest() == "done");
}
