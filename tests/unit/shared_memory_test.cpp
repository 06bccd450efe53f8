// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/fabrics/shared_memory.hpp>
#include <weightwire/fabrics/shared_memory_arena.hpp>

#include "../support/forked.hpp"
#include "../support/no_descriptors.hpp"

namespace {

namespace shm = weightwire::shm;

/// A memory file with the given seals, which need not be the right ones.
class raw_file {
public:
    raw_file(off_t bytes, int seals)
        : number_{::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING)} {
        REQUIRE(::ftruncate(number_, bytes) == 0);
        if (seals != 0) {
            REQUIRE(::fcntl(number_, F_ADD_SEALS, seals) == 0);
        }
    }
    raw_file(const raw_file&) = delete;
    raw_file& operator=(const raw_file&) = delete;
    ~raw_file() { ::close(number_); }
    [[nodiscard]] int number() const { return number_; }

private:
    int number_;
};

shm::handle handle_of(int fd, std::uint64_t length, std::uint64_t offset = 0) {
    const auto self = shm::this_process();
    return {.pid = self.pid,
            .fd = fd,
            .start_time = self.start_time,
            .offset = offset,
            .length = length};
}

constexpr int both_seals = F_SEAL_SHRINK | F_SEAL_GROW;

/// What `open` of a handle says, from another process.
std::string opened_elsewhere(const shm::handle& handle) {
    tests::forked child{[&](tests::channel& parent) {
        const auto mapped = shm::mapping::open(handle, {.what = "the test's bytes"});
        parent.put_text("mapped");
    }};
    return child.to().rest();
}

bool has(const std::string& text, std::string_view part) {
    return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("a shared segment can neither shrink nor grow, and the seals cannot be added to") {
    const auto segment = shm::segment::create(10'000);
    CHECK(segment.size() == 10'000);
    CHECK(::ftruncate(segment.native_handle(), 0) == -1);
    CHECK(::ftruncate(segment.native_handle(), 1 << 20) == -1);
    const int seals = ::fcntl(segment.native_handle(), F_GET_SEALS);
    CHECK((seals & shm::required_seals) == shm::required_seals);
    CHECK((seals & F_SEAL_SEAL) != 0);
    CHECK_THROWS_AS(static_cast<void>(shm::segment::create(0)), weightwire::usage_error);
    CHECK_THROWS_AS(static_cast<void>(shm::segment::create(UINT64_MAX)), weightwire::usage_error);
}

TEST_CASE("a process that can open no more files blames the limit, not its peer") {
    const auto segment = shm::segment::create(4096);
    const auto handle = segment.exported();
    tests::forked child{[&](tests::channel& parent) {
        const auto self = shm::this_process();
        const auto says = [](auto&& call) -> std::string {
            try {
                call();
            } catch (const weightwire::resource_error& refused) {
                return has(refused.what(), "raise the limit of open files") ? "limit\n"
                                                                            : refused.what();
            } catch (const std::exception& other) {
                return other.what();
            }
            return "nothing\n";
        };
        // As in no_descriptors: the sanitizer must have met the type before.
        static_cast<void>(says([] { throw weightwire::resource_error{"once"}; }));
        std::string text;
        {
            const test_support::no_descriptors none;
            text += says([&] { static_cast<void>(shm::mapping::open(handle)); });
            text += says([] { static_cast<void>(shm::this_process()); });
            text += says([] { static_cast<void>(shm::address_map::of_this_process()); });
            text += says([] { static_cast<void>(shm::sealed_descriptor_of({})); });
            const shm::process_watch watch{{.pid = handle.pid, .start_time = handle.start_time}};
            text += watch.alive() ? "alive" : "dead";
            const shm::process_watch nobody{{.pid = -1, .start_time = 1}};
            text += nobody.alive() ? " somebody" : " nobody";
        }
        const shm::process_watch wrong{{.pid = self.pid, .start_time = self.start_time + 1}};
        text += wrong.alive() ? " alive" : " dead";
        parent.put_text(text);
    }};
    CHECK(child.to().rest() == "limit\nlimit\nlimit\nlimit\nalive nobody dead");
}

TEST_CASE("a segment that no memory can back is an error, not a crash") {
    CHECK_THROWS_AS(static_cast<void>(shm::segment::create(std::uint64_t{1} << 52U)),
                    weightwire::resource_error);
}

TEST_CASE(
    "another process sees the bytes of a handle, also those written later, but cannot write") {
    const auto segment = shm::segment::create(3 * 4096);
    std::memset(segment.data(), 7, segment.size());
    auto handle = segment.exported();
    handle.offset = 5000;
    handle.length = 100;
    tests::forked child{[&](tests::channel& parent) {
        const auto mapped = shm::mapping::open(handle);
        parent.put(mapped.data()[0]);
        parent.put(parent.take<char>());
        parent.put(mapped.data()[99]);
        parent.put(mapped.resolved_locally());
        try {
            const auto writable =
                shm::mapping::open(handle, {.use = shm::sharing::writable, .what = "it"});
            parent.put_text("writable");
        } catch (const weightwire::protocol_error& refused) {
            parent.put_text(refused.what());
        }
    }};
    CHECK(child.to().take<std::byte>() == std::byte{7});
    segment.data()[5099] = std::byte{9};
    child.to().put('x');
    CHECK(child.to().take<char>() == 'x');
    CHECK(child.to().take<std::byte>() == std::byte{9});
    CHECK_FALSE(child.to().take<bool>());
    CHECK(has(child.to().rest(), "sealed against writing"));
}

TEST_CASE("a segment made writable can be written by another process") {
    const auto segment = shm::segment::create(64, shm::sharing::writable);
    tests::forked child{[&](tests::channel& parent) {
        const auto mapped = shm::mapping::open(segment.exported(), {.use = shm::sharing::writable});
        mapped.writable_data()[63] = std::byte{42};
        parent.put_text("done");
    }};
    CHECK(child.to().rest() == "done");
    CHECK(segment.data()[63] == std::byte{42});
}

TEST_CASE("mapped bytes outlive their process") {
    tests::forked child{[](tests::channel& parent) {
        const auto segment = shm::segment::create(8192);
        std::memset(segment.data(), 3, segment.size());
        parent.put(segment.exported());
        static_cast<void>(parent.take<char>());
    }};
    const auto handle = child.to().take<shm::handle>();
    const auto mapped = shm::mapping::open(handle);
    const shm::process_watch watch{handle.owner()};
    CHECK(watch.alive());
    child.kill();
    CHECK_FALSE(watch.alive());
    CHECK(mapped.data()[8191] == std::byte{3});
    CHECK_THROWS_AS(static_cast<void>(shm::mapping::open(handle)), weightwire::peer_error);
}

TEST_CASE("a handle of the same process resolves to its address without a mapping") {
    const auto segment = shm::segment::create(4096 * 4);
    auto handle = segment.exported();
    handle.offset = 4100;
    handle.length = 77;
    const auto mapped = shm::mapping::open(handle);
    CHECK(mapped.data() == segment.data() + 4100);
    CHECK(mapped.size() == 77);
    CHECK(mapped.resolved_locally());
    auto moved = shm::mapping::open(handle);
    auto other = std::move(moved);
    CHECK_FALSE(bool{moved});  // NOLINT(bugprone-use-after-move)
    CHECK(other.data() == segment.data() + 4100);
}

TEST_CASE("a handle that lies gives one error that says in what, and nothing is mapped") {
    const auto segment = shm::segment::create(4096);
    const auto good = segment.exported();
    REQUIRE(opened_elsewhere(good) == "mapped");
    auto bad = good;

    SUBCASE("a length past the end") {
        bad.length = 4097;
        CHECK(has(opened_elsewhere(bad), "the memory file has 4096 bytes, fewer than"));
    }
    SUBCASE("an offset past the end") {
        bad.offset = 1;
        CHECK(has(opened_elsewhere(bad), "fewer than offset + length = 4097"));
    }
    SUBCASE("offset and length that overflow") {
        bad.offset = UINT64_MAX - 10;
        CHECK(has(opened_elsewhere(bad), "no range of bytes"));
    }
    SUBCASE("no bytes") {
        bad.length = 0;
        CHECK(has(opened_elsewhere(bad), "no range of bytes"));
    }
    SUBCASE("a descriptor that is not open") {
        bad.fd = 1000;
        CHECK(has(opened_elsewhere(bad), "no such descriptor"));
    }
    SUBCASE("a descriptor number out of range") {
        bad.fd = std::int64_t{1} << 40U;
        CHECK(has(opened_elsewhere(bad), "out of range"));
        bad.fd = -1;
        CHECK(has(opened_elsewhere(bad), "out of range"));
    }
    SUBCASE("a process number out of range") {
        bad.pid = std::int64_t{1} << 40U;
        CHECK(has(opened_elsewhere(bad), "out of range"));
        bad.pid = 0;
        CHECK(has(opened_elsewhere(bad), "out of range"));
    }
    SUBCASE("a process that does not exist") {
        bad.pid = 0x3FFFFFFF;
        CHECK(has(opened_elsewhere(bad), "is gone or in another PID namespace"));
    }
    SUBCASE("another process") {
        bad.pid = 1;
        const auto text = opened_elsewhere(bad);
        CHECK((has(text, "the peer has died") || has(text, "no such descriptor")));
    }
    SUBCASE("another start time: the number was reused") {
        bad.start_time += 1;
        CHECK(has(opened_elsewhere(bad), "the peer has died"));
    }
    SUBCASE("the message names what it was for, and its errors are catchable as leaves") {
        bad.length = 4097;
        CHECK(has(opened_elsewhere(bad), "the handle of the test's bytes"));
        CHECK_THROWS_AS(static_cast<void>(shm::mapping::open(bad)), weightwire::protocol_error);
        bad = good;
        bad.start_time += 1;
        CHECK_THROWS_AS(static_cast<void>(shm::mapping::open(bad)), weightwire::peer_error);
    }
}

TEST_CASE("a file that could shrink under its reader is refused") {
    const raw_file unsealed{4096, 0};
    const raw_file may_shrink{4096, F_SEAL_GROW};
    const raw_file may_grow{4096, F_SEAL_SHRINK};
    const raw_file sealed{4096, both_seals};
    const raw_file truncated{4096, 0};
    REQUIRE(::ftruncate(truncated.number(), 100) == 0);
    constexpr auto refusal = "not sealed against shrinking and growing";
    CHECK(has(opened_elsewhere(handle_of(unsealed.number(), 4096)), refusal));
    CHECK(has(opened_elsewhere(handle_of(may_shrink.number(), 4096)), refusal));
    CHECK(has(opened_elsewhere(handle_of(may_grow.number(), 4096)), refusal));
    CHECK(has(opened_elsewhere(handle_of(truncated.number(), 4096)), refusal));
    CHECK(opened_elsewhere(handle_of(sealed.number(), 4096)) == "mapped");
}

TEST_CASE("descriptors that lead to something else are refused") {
    std::array<int, 2> ends{};
    REQUIRE(::pipe(ends.data()) == 0);
    const int file = ::open("/proc/self/exe", O_RDONLY);
    const int folder = ::open("/", O_RDONLY);
    const int device = ::open("/dev/zero", O_RDWR);
    const int named = ::open("/dev/shm", O_TMPFILE | O_RDWR, 0600);
    REQUIRE((file >= 0 && folder >= 0 && device >= 0));
    for (const int each : {ends[0], ends[1], folder, device}) {
        CHECK(has(opened_elsewhere(handle_of(each, 1)), "does not lead to a memory file"));
    }
    CHECK(has(opened_elsewhere(handle_of(file, 1)), "is refused"));
    if (named >= 0) {
        REQUIRE(::ftruncate(named, 4096) == 0);
        CHECK(has(opened_elsewhere(handle_of(named, 4096)), "is refused"));
    }
    for (const int each : {ends[0], ends[1], file, folder, device, named}) {
        ::close(each);
    }
}

TEST_CASE("the memory file of another user is refused, root's and one's own are not") {
    if (::geteuid() != 0) {
        MESSAGE("skipped: needs root to change the user");
        return;
    }
    const auto segment = shm::segment::create(4096);
    REQUIRE(::fchown(segment.native_handle(), 4711, 4711) == 0);
    CHECK(opened_elsewhere(segment.exported()) == "mapped");  // root reads anybody's
    tests::forked child{[&](tests::channel& parent) {
        // The descriptor is inherited, so that only the owner's check can refuse it.
        if (::setgid(12345) != 0 || ::setuid(12345) != 0 ||
            ::fchmod(segment.native_handle(), 0777) == 0) {
            parent.put_text("no other user");
            return;
        }
        const auto mapped =
            shm::mapping::open({.pid = ::getpid(),
                                .fd = segment.native_handle(),
                                .start_time = shm::start_time_of(::getpid()).value_or(0),
                                .length = 4096});
        parent.put_text("mapped");
    }};
    const auto text = child.to().rest();
    CHECK((has(text, "belongs to user 4711") || has(text, "the kernel refuses")));
}

TEST_CASE("a process is known by number and start time") {
    const auto self = shm::this_process();
    CHECK(self.pid == ::getpid());
    CHECK(shm::start_time_of(self.pid) == self.start_time);
    CHECK_FALSE(shm::start_time_of(0x3FFFFFFF));
    CHECK(shm::process_watch{self}.alive());
    CHECK_FALSE(shm::process_watch{{.pid = self.pid, .start_time = self.start_time + 1}}.alive());
    CHECK_FALSE(shm::process_watch{{.pid = -1, .start_time = 1}}.alive());
    CHECK_FALSE(shm::process_watch{}.alive());
}

TEST_CASE("a process that ended but was not waited for is dead") {
    tests::forked child{[](tests::channel& parent) { static_cast<void>(parent.take<char>()); }};
    const shm::process_identity who{.pid = child.process(),
                                    .start_time = shm::start_time_of(child.process()).value()};
    const shm::process_watch watch{who};
    CHECK(watch.alive());
    child.to().put('x');
    CHECK(child.to().rest().empty());
    siginfo_t info{};
    REQUIRE(::waitid(P_PID, static_cast<id_t>(who.pid), &info, WEXITED | WNOWAIT) == 0);
    CHECK_FALSE(watch.alive());
    CHECK_FALSE(shm::process_watch{who}.alive());
}

TEST_CASE("a command name with blanks and parentheses does not shift the fields of its process") {
    const auto parse = [](std::string_view text) { return shm::detail::parse_process_stat(text); };
    const std::string fields = " S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20";
    CHECK(parse("12 (name)" + fields)->start_time == 4711);
    CHECK(parse("12 (a) R 1 2 (b))" + fields)->start_time == 4711);
    CHECK(parse("12 (name)" + fields)->state == 'S');
    CHECK_FALSE(parse("12 (name) S 1 2 3"));
    CHECK_FALSE(parse(""));
    CHECK_FALSE(parse("12 (name)"));
    CHECK_FALSE(parse("no parenthesis"));
}

TEST_CASE("memory is found by its address, in an arena or in a sealed file of one's own") {
    shm::arena arena{1 << 20};
    const auto one = arena.allocate(weightwire::dtype::f32, {100, 3});
    const auto two = arena.allocate(weightwire::dtype::u8, {13});
    const raw_file own{8192, both_seals};
    auto* const mapped = static_cast<std::byte*>(
        ::mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, own.number(), 0));
    auto* const copied = static_cast<std::byte*>(
        ::mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE, own.number(), 0));
    const std::vector<std::byte> heap(100);
    const auto map = shm::address_map::of_this_process();
    const auto self = shm::this_process();

    const auto first = map.find(one.data(), one.byte_size());
    const auto second = map.find(two.data(), two.byte_size());
    REQUIRE((first && second));
    CHECK(first->offset == 0);
    CHECK(second->offset == 1216);  // 1200 bytes, rounded up to a cache line
    CHECK(first->file == second->file);
    CHECK(shm::exported_file(first->file, self) == arena.segment().exported());

    const auto third = map.find(mapped + 4097, 1000);
    REQUIRE(third);
    CHECK(third->offset == 4097);
    CHECK(shm::exported_file(third->file, self)->fd == own.number());
    CHECK(map.address_of(third->file, 4097, 1000, true) == mapped + 4097);
    CHECK(map.address_of(third->file, 4097, 5000, true) == nullptr);

    CHECK_FALSE(map.find(mapped + 4097, 1 << 20));
    CHECK_FALSE(map.find(copied, 10));
    CHECK_FALSE(map.find(heap.data(), heap.size()));
    CHECK_FALSE(map.find(nullptr, 1));
    ::munmap(mapped, 8192);
    ::munmap(copied, 8192);
}

TEST_CASE("a memory file without seals, or whose descriptor was closed, cannot be exported") {
    std::optional<raw_file> file{std::in_place, 4096, 0};
    void* const mapped = ::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, file->number(), 0);
    const auto map = shm::address_map::of_this_process();
    const auto found = map.find(mapped, 4096);
    REQUIRE(found);
    CHECK_FALSE(shm::exported_file(found->file, shm::this_process()));
    file.emplace(4096, both_seals);
    CHECK_FALSE(shm::exported_file(found->file, shm::this_process()));
    ::munmap(mapped, 4096);
}

TEST_CASE("one mapping that the kernel lists in several lines is one region") {
    const auto segment = shm::segment::create(64 * 4096);
    REQUIRE(::madvise(segment.data() + 16 * 4096, 8 * 4096, MADV_DONTDUMP) == 0);
    const auto map = shm::address_map::of_this_process();
    const auto found = map.find(segment.data() + 100, 60 * 4096);
    REQUIRE(found);
    CHECK(found->offset == 100);
}

TEST_CASE("an arena hands out aligned tensors until it is full") {
    const weightwire::manifest parameters{{{"a", weightwire::dtype::bf16, {3, 5}},
                                           {"b", weightwire::dtype::f32, {}},
                                           {"c", weightwire::dtype::u8, {0}},
                                           {"d", weightwire::dtype::u8, {65}}}};
    shm::arena arena{shm::arena::bytes_for(parameters)};
    for (const auto& parameter : parameters.parameters()) {
        const auto tensor = arena.allocate(parameter.dtype, parameter.shape);
        CHECK(tensor.byte_size() == parameter.byte_size());
        CHECK(reinterpret_cast<std::uintptr_t>(tensor.data()) % shm::arena::alignment == 0);
    }
    CHECK(arena.used() <= arena.size());
    CHECK_THROWS_AS(static_cast<void>(arena.allocate(weightwire::dtype::u8, {1000})),
                    weightwire::resource_error);
    CHECK_THROWS_AS(static_cast<void>(arena.allocate(weightwire::dtype::f6_e2m3, {3})),
                    weightwire::usage_error);
    auto moved = std::move(arena);
    CHECK(moved.segment().size() == shm::arena::bytes_for(parameters));
}
