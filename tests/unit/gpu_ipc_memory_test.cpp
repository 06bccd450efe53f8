// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/gpu/allocation_info.hpp>
#include <weightwire/gpu/ipc_cache.hpp>

namespace gpu = weightwire::gpu;

namespace {

/// What stands for CUDA: addresses by handle, and how often each is open.
struct fake_driver {
    std::map<std::string, gpu::opened_memory> known{};
    std::map<const std::byte*, int> open{};
    int opened = 0;
    int closed = 0;
    bool fails = false;
};

struct fake_calls {
    fake_driver* driver;

    [[nodiscard]] gpu::opened_memory open(int device, const std::string& handle) const {
        const auto found = driver->known.find(handle);
        if (driver->fails || found == driver->known.end()) {
            throw weightwire::protocol_error{"no handle"};
        }
        // Each device has its own place for the same memory.
        const gpu::opened_memory result{found->second.data + device, found->second.bytes};
        ++driver->opened;
        ++driver->open[result.data];
        return result;
    }
    void close(int, const std::byte* data) const noexcept {
        ++driver->closed;
        --driver->open.at(data);
    }
};

using imports = gpu::ipc_imports<fake_calls>;

static_assert(std::is_nothrow_default_constructible_v<imports::mapping>);
static_assert(std::is_nothrow_move_constructible_v<imports::mapping>);
static_assert(std::is_nothrow_move_assignable_v<imports::mapping>);
static_assert(!std::is_copy_constructible_v<imports::mapping>);

/// Memory that the fake driver maps.
std::array<std::byte, 4096> memory{};

constexpr gpu::ipc_exporter trainer{.pid = 4711, .start_time = 99};

gpu::ipc_export allocation(const std::string& handle, std::uint64_t base, std::uint64_t bytes,
                           std::uint64_t buffer_id) {
    return {.handle = handle, .base = base, .bytes = bytes, .buffer_id = buffer_id};
}

gpu::allocation_info plain_memory() {
    return {.place = gpu::allocation_place::device,
            .device = 0,
            .base = 0x1000,
            .bytes = 0x800,
            .buffer_id = 5,
            .handle_types = 0,
            .is_of_pool = false,
            .has_ipc_handle = true};
}

template <class Error, class Call>
std::string text_of(const Call& call) {
    try {
        call();
    } catch (const Error& failure) {
        return failure.text();
    }
    return {};
}

bool holds(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("a device's UUID is spelled as torch spells it") {
    std::array<std::byte, 16> bytes{};
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        bytes[i] = static_cast<std::byte>(0x48 + 11 * i);
    }
    CHECK(gpu::uuid_text(bytes) == "48535e69-747f-8a95-a0ab-b6c1ccd7e2ed");
    CHECK(gpu::uuid_text(std::array<std::byte, 16>{}) == "00000000-0000-0000-0000-000000000000");
    CHECK(gpu::hex_text(std::array{std::byte{0x00}, std::byte{0xff}, std::byte{0x0a}}) == "00ff0a");
    CHECK(gpu::hex_text({}).empty());
}

TEST_CASE("memory that has no handle is told apart, with what to do about it") {
    auto found = plain_memory();
    CHECK(gpu::why_not_exportable(found, 0x1000, 0x800).empty());
    CHECK(gpu::why_not_exportable(found, 0x1400, 0x400).empty());
    CHECK(gpu::why_not_exportable(found, 0x1800, 0).empty());

    CHECK(holds(gpu::why_not_exportable({}, 0x1000, 1), "not memory of a device"));
    found.place = gpu::allocation_place::host;
    CHECK(holds(gpu::why_not_exportable(found, 0x1000, 1), "pinned host memory"));
    found.place = gpu::allocation_place::managed;
    CHECK(holds(gpu::why_not_exportable(found, 0x1000, 1), "managed"));
    found = plain_memory();
    found.has_ipc_handle = false;
    CHECK(holds(gpu::why_not_exportable(found, 0x1000, 1), "expandable_segments"));
    found.is_of_pool = true;
    CHECK(holds(gpu::why_not_exportable(found, 0x1000, 1), "cudaMallocAsync"));
}

TEST_CASE("bytes beyond their allocation are not exported, whatever the numbers") {
    const auto found = plain_memory();
    CHECK(
        holds(gpu::why_not_exportable(found, 0x1400, 0x401), "1025 bytes at offset 1024 of 2048"));
    CHECK(!gpu::why_not_exportable(found, 0x0fff, 1).empty());
    CHECK(!gpu::why_not_exportable(found, 0x1801, 0).empty());
    CHECK(!gpu::why_not_exportable(found, 0x1001, ~std::uint64_t{0}).empty());
    CHECK(!gpu::why_not_exportable(found, ~std::uint64_t{0}, 2).empty());
}

TEST_CASE("an export is found by its allocation and by its handle, and by nothing else") {
    gpu::ipc_exports exports;
    const auto first = allocation("first", 0x1000, 0x1000, 7);
    const auto second = allocation("second", 0x2000, 0x1000, 8);
    exports.add(first);
    exports.add(second);
    CHECK(exports.find(0x1000, 7) == first);
    CHECK(exports.find("second") == second);
    CHECK(!exports.find(0x1000, 8));
    CHECK(!exports.find(0x1800, 7));
    CHECK(!exports.find("third"));
    exports.add(allocation("nameless", 0x9000, 1, 0));
    CHECK(!exports.find(0x9000, 0));  // it may be an earlier one
    CHECK(exports.find("nameless"));
}

TEST_CASE("an export whose memory was freed is forgotten when that memory is exported again") {
    gpu::ipc_exports exports;
    exports.add(allocation("a", 0x1000, 0x1000, 1));
    exports.add(allocation("b", 0x2000, 0x1000, 2));
    exports.add(allocation("c", 0x3000, 0x1000, 3));
    exports.add(allocation("d", 0x4000, 0x1000, 4));
    exports.add(allocation("over b and c", 0x2800, 0x1000, 5));
    CHECK(exports.size() == 3);
    CHECK(exports.find("a"));
    CHECK(!exports.find("b"));
    CHECK(!exports.find("c"));
    CHECK(exports.find("d"));
    exports.add(allocation("a", 0x1000, 0x1000, 6));  // the same address and handle
    CHECK(exports.size() == 3);
    CHECK(!exports.find(0x1000, 1));
    CHECK(exports.find("a")->buffer_id == 6);
    exports.add(allocation("a", 0x8000, 0x1000, 9));  // the same handle elsewhere
    CHECK(exports.size() == 3);
    CHECK(exports.find("a")->base == 0x8000);
    CHECK(!exports.find(0x1000, 6));
}

TEST_CASE("an allocation is opened once for many mappings, and closed by the last") {
    fake_driver driver{.known = {{"h", {memory.data(), 1000}}}};
    imports opened{fake_calls{&driver}};
    const auto what = allocation("h", 0x1000, 1000, 1);
    {
        std::vector<imports::mapping> mappings;
        for (int i = 0; i < 100; ++i) {
            mappings.push_back(opened.open(0, trainer, what));
            CHECK(mappings.back().data() == memory.data());
            CHECK(mappings.back().size() == 1000);
        }
        CHECK(driver.opened == 1);
        CHECK(opened.size() == 1);
        mappings.resize(1);
        CHECK(driver.closed == 0);
        const auto elsewhere = opened.open(1, trainer, what);  // another device maps it as well
        CHECK(elsewhere.data() == memory.data() + 1);
        CHECK(driver.opened == 2);
    }
    CHECK(driver.closed == 2);
    CHECK(opened.size() == 0);
    static_cast<void>(opened.open(0, trainer, what));
    CHECK(driver.opened == 3);
    CHECK(driver.closed == 3);
}

TEST_CASE("a mapping moves: it is closed once, by whoever holds it last") {
    fake_driver driver{.known = {{"h", {memory.data(), 10}}, {"i", {memory.data() + 100, 10}}}};
    imports opened{fake_calls{&driver}};
    imports::mapping held;
    CHECK(held.data() == nullptr);
    CHECK(held.size() == 0);
    {
        auto first = opened.open(0, trainer, allocation("h", 1, 10, 1));
        held = std::move(first);
    }
    CHECK(driver.closed == 0);
    CHECK(held.data() == memory.data());
    held = opened.open(0, trainer, allocation("i", 2, 10, 2));
    CHECK(driver.closed == 1);
    imports::mapping last{std::move(held)};
    CHECK(last.data() == memory.data() + 100);
    last = imports::mapping{memory.data() + 500, 20};  // this process's own: nothing to close
    CHECK(driver.closed == 2);
    CHECK(last.size() == 20);
    last = imports::mapping{};
    CHECK(driver.closed == 2);
}

TEST_CASE("whatever tells one allocation from another makes it an opening of its own") {
    fake_driver driver;
    for (std::size_t i = 0; i < 6; ++i) {
        driver.known[std::to_string(i)] = {memory.data() + 100 * i, 10};
    }
    imports opened{fake_calls{&driver}};
    std::vector<imports::mapping> held;
    const auto open = [&](const gpu::ipc_exporter& from, const gpu::ipc_export& what) {
        held.push_back(opened.open(0, from, what));
        return driver.opened;
    };
    CHECK(open(trainer, allocation("0", 10, 10, 1)) == 1);
    CHECK(open(trainer, allocation("0", 10, 10, 1)) == 1);
    CHECK(open(trainer, allocation("1", 10, 10, 1)) == 2);
    driver.known["0"].data = memory.data() + 1000;  // the driver answers anew
    CHECK(open(trainer, allocation("0", 10, 10, 2)) == 3);
    driver.known["0"].data = memory.data() + 1100;
    CHECK(open(trainer, allocation("0", 20, 10, 1)) == 4);
    driver.known["0"].data = memory.data() + 1200;
    CHECK(open({.pid = 4712, .start_time = 99}, allocation("0", 10, 10, 1)) == 5);
    driver.known["0"].data = memory.data() + 1300;
    CHECK(open({.pid = 4711, .start_time = 98}, allocation("0", 10, 10, 1)) == 6);
    held.clear();
    CHECK(driver.closed == 6);
}

TEST_CASE("an allocation smaller than its exporter says is refused, with both sizes") {
    fake_driver driver{.known = {{"h", {memory.data(), 100}}}};
    imports opened{fake_calls{&driver}};
    const auto refused = [&] {
        static_cast<void>(opened.open(0, trainer, allocation("h", 1, 101, 1)));
    };
    const auto text = text_of<weightwire::protocol_error>(refused);
    CHECK(holds(text, "100 bytes"));
    CHECK(holds(text, "101"));
    CHECK(driver.closed == 1);
    CHECK(opened.size() == 0);

    // A liar closes nothing that others use.
    const auto good = opened.open(0, trainer, allocation("h", 1, 100, 1));
    CHECK(!text_of<weightwire::protocol_error>(refused).empty());
    CHECK(driver.closed == 1);
    CHECK(opened.open(0, trainer, allocation("h", 1, 60, 1)).size() == 60);
    CHECK(opened.open(0, trainer, allocation("h", 1, 0, 1)).size() == 100);  // not known
    CHECK(opened.size() == 1);
}

TEST_CASE("memory that took the place of what is still open is refused, not read as the former") {
    fake_driver driver{.known = {{"h", {memory.data(), 100}}}};
    imports opened{fake_calls{&driver}};
    auto former = opened.open(0, trainer, allocation("h", 1, 100, 1));
    // The driver gives the former again as long as it is open.
    const auto refused = [&] {
        static_cast<void>(opened.open(0, trainer, allocation("h", 1, 100, 2)));
    };
    CHECK(holds(text_of<weightwire::peer_error>(refused), "freed"));
    CHECK(driver.open.at(memory.data()) == 1);
    CHECK(former.data() == memory.data());
    CHECK_NOTHROW(static_cast<void>(opened.open(1, trainer, allocation("h", 1, 100, 2))));
    former = {};
    const auto later = opened.open(0, trainer, allocation("h", 1, 100, 2));
    CHECK(later.data() == memory.data());
    CHECK(driver.open.at(memory.data()) == 1);
}

TEST_CASE("who knows less of an allocation shares it with who knows more") {
    fake_driver driver{.known = {{"h", {memory.data(), 100}}}};
    imports opened{fake_calls{&driver}};
    {
        const auto full = opened.open(0, trainer, allocation("h", 1, 100, 1));
        const auto less = opened.open(0, {.pid = 0, .start_time = 0}, allocation("h", 0, 0, 0));
        CHECK(less.data() == full.data());
    }
    CHECK(driver.opened == driver.closed);
    CHECK(driver.open.at(memory.data()) == 0);
}

TEST_CASE("an opening that fails leaves nothing, and may succeed later") {
    fake_driver driver{.known = {{"h", {memory.data(), 100}}}, .fails = true};
    imports opened{fake_calls{&driver}};
    const auto open = [&] { return opened.open(0, trainer, allocation("h", 1, 100, 1)); };
    CHECK_THROWS_AS(static_cast<void>(open()), weightwire::protocol_error);
    CHECK(opened.size() == 0);
    CHECK(driver.closed == 0);
    driver.fails = false;
    const auto mapping = open();
    CHECK(mapping.size() == 100);
}

TEST_CASE("threads share openings, and every opening is closed") {
    fake_driver driver;
    for (std::size_t i = 0; i < 3; ++i) {
        driver.known[std::to_string(i)] = {memory.data() + 100 * i, 10};
    }
    imports opened{fake_calls{&driver}};
    std::array<int, 4> wrong{};
    {
        std::vector<std::jthread> threads;
        for (std::size_t t = 0; t < wrong.size(); ++t) {
            threads.emplace_back([&, t] {
                std::array<imports::mapping, 3> held;
                for (std::size_t k = 0; k < 3000; ++k) {
                    const std::size_t i = (k * 7 + t) % 3;
                    held[k % 3] =
                        opened.open(0, trainer, allocation(std::to_string(i), 1 + i, 10, 1 + i));
                    wrong[t] += held[k % 3].data() == memory.data() + 100 * i ? 0 : 1;
                }
            });
        }
    }
    CHECK(wrong == std::array<int, 4>{});
    CHECK(opened.size() == 0);
    CHECK(driver.opened == driver.closed);
    for (const auto& [data, uses] : driver.open) {
        CHECK(uses == 0);
    }
}
