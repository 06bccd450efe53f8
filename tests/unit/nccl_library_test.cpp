// SPDX-License-Identifier: Apache-2.0

#include <dlfcn.h>
#include <doctest/doctest.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/gpu/lost_devices.hpp>
#include <weightwire/nccl_api/communicator.hpp>
#include <weightwire/nccl_api/element.hpp>
#include <weightwire/nccl_api/error.hpp>
#include <weightwire/nccl_api/library.hpp>

#include "../support/temporary_folder.hpp"

using namespace weightwire;
using nccl_api::library;

namespace {

/// A program or library that is built beside this test.
std::string beside(const std::string& name) {
    std::array<char, 4096> path{};
    const auto length = ::readlink("/proc/self/exe", path.data(), path.size() - 1);
    std::string own{path.data(), static_cast<std::size_t>(length > 0 ? length : 0)};
    return own.substr(0, own.rfind('/') + 1) + name;
}

/// A real libnccl, where the machine has one.
std::optional<library> real_library(const char* test) {
    const char* path = std::getenv("WEIGHTWIRE_LIBNCCL");
    try {
        return library::open(path != nullptr ? path : "");
    } catch (const unsupported_error&) {
        std::printf("SKIP %s: this machine has no libnccl\n", test);
        return std::nullopt;
    }
}

/// What `test_nccl_linked` prints, opening `path`.
std::string linked_and_opened(const std::string& path) {
    const std::string command = "'" + beside("test_nccl_linked") + "' '" + path + "'";
    const std::unique_ptr<FILE, int (*)(FILE*)> out{::popen(command.c_str(), "r"), ::pclose};
    REQUIRE(out != nullptr);
    std::string text(4096, '\0');
    text.resize(std::fread(text.data(), 1, text.size(), out.get()));
    return text;
}

/// While it lives, the fake's last words; before and after, none.
class last_words_of_fake {
public:
    explicit last_words_of_fake(const char* words) : before_{say(words)} {}
    last_words_of_fake(const last_words_of_fake&) = delete;
    last_words_of_fake& operator=(const last_words_of_fake&) = delete;
    ~last_words_of_fake() { say(before_); }

private:
    static const char* say(const char* words) {
        using function = const char* (*)(const char*);
        void* handle = ::dlopen(beside("libfake_nccl_a.so").c_str(), RTLD_NOW | RTLD_NOLOAD);
        REQUIRE(handle != nullptr);
        void* const found = ::dlsym(handle, "fake_nccl_say");
        ::dlclose(handle);  // the library's cache keeps it
        REQUIRE(found != nullptr);
        return reinterpret_cast<function>(found)(words);
    }
    const char* before_;
};

constexpr bool binds_deeply = (nccl_api::detail::open_flags() & RTLD_DEEPBIND) != 0;

}  // namespace

TEST_CASE("a libnccl is opened by path: it tells its version and its file, once a process") {
    const auto first = library::open(beside("libfake_nccl_a.so"));
    CHECK(first.version() == 29901);
    CHECK(first.path() == beside("libfake_nccl_a.so"));
    CHECK(first.description().find("2.99.1") != std::string::npos);
    CHECK(first.description().find("by the path that was given") != std::string::npos);
    CHECK(library::open(beside("libfake_nccl_a.so")) == first);
}

TEST_CASE("two copies of different versions live in one process") {
    if (!binds_deeply) {
        std::printf("SKIP two copies: this build's sanitizer forbids deep binding\n");
        return;
    }
    const auto first = library::open(beside("libfake_nccl_a.so"));
    const auto second = library::open(beside("libfake_nccl_b.so"));
    CHECK(first.version() == 29901);
    CHECK(second.version() == 29902);
    CHECK_FALSE(first == second);
}

TEST_CASE("a process that is linked to one copy opens another by path and gets that one's calls") {
    if (!binds_deeply) {
        std::printf("SKIP linked to another copy: this build's sanitizer forbids deep binding\n");
        return;
    }
    const auto other = beside("libfake_nccl_b.so");
    CHECK(linked_and_opened(other) == "29901 29902 " + other + "\n");
    if (const auto real = real_library("linked to another copy, the real one")) {
        CHECK(linked_and_opened(real->path()) ==
              "29901 " + std::to_string(real->version()) + " " + real->path() + "\n");
    }
}

TEST_CASE("the installed libnccl is found without a path and says how") {
    if (const auto real = real_library("the installed libnccl")) {
        CHECK(real->version() >= 21800);
        CHECK(real->path().find("nccl") != std::string::npos);
        CHECK(real->description().find(nccl_api::version_text(real->version())) !=
              std::string::npos);
        CHECK(library::open(real->path()) == *real);
    }
}

TEST_CASE("a missing file is an error that names it and the remedy") {
    try {
        static_cast<void>(library::open("/nowhere/libnccl.so.2"));
        FAIL("it opened");
    } catch (const unsupported_error& failed) {
        const std::string text = failed.what();
        CHECK(text.find("/nowhere/libnccl.so.2") != std::string::npos);
        CHECK(text.find("the peer uses") != std::string::npos);
        CHECK(failed.context().operation == "dlopen");
        CHECK(failed.context().native_text.find("No such file") != std::string::npos);
    }
}

TEST_CASE("a file that is no library, and a library that is no libnccl, are refused by name") {
    const test_support::temporary_folder folder;
    const auto text = folder.write("libnccl.so.2", "not a library");
    CHECK_THROWS_WITH_AS(static_cast<void>(library::open(text)), doctest::Contains(text.c_str()),
                         unsupported_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(library::open("libm.so.6")),
                         doctest::Contains("ncclGetVersion"), unsupported_error);
}

TEST_CASE("versions are written as people write them") {
    CHECK(nccl_api::version_text(22809) == "2.28.9");
    CHECK(nccl_api::version_text(21903) == "2.19.3");
}

TEST_CASE("a group of one, and a rank outside the group, are refused before anything is touched") {
    const auto used = library::open(beside("libfake_nccl_a.so"));
    const auto id = nccl_api::communicator::make_unique_id(used);
    const auto join = [&](int size, int rank) {
        static_cast<void>(nccl_api::communicator::join(
            used, id, size, rank, 0, deadline::after(std::chrono::seconds{1}), std::stop_token{}));
    };
    CHECK_THROWS_AS(join(1, 0), usage_error);
    CHECK_THROWS_AS(join(2, 2), usage_error);
    CHECK_THROWS_AS(join(2, -1), usage_error);
}

TEST_CASE("NCCL's failures become errors by what the caller can do, with its words") {
    const auto used = library::open(beside("libfake_nccl_a.so"));
    const auto raise = [&](ncclResult_t result, const char* words) {
        nccl_api::throw_failure(used, result, "ncclExample", words, {.peer = "rank 1"});
    };
    CHECK_THROWS_AS(raise(ncclRemoteError, "socketProgress: Connection closed by remote peer"),
                    peer_error);
    CHECK_THROWS_AS(raise(ncclSystemError, "socketPollConnect: connect returned Refused"),
                    peer_error);
    CHECK_THROWS_AS(raise(ncclSystemError, "out of memory"), resource_error);
    CHECK_THROWS_AS(raise(ncclUnhandledCudaError, ""), resource_error);
    CHECK_THROWS_AS(raise(ncclInvalidArgument, ""), usage_error);
    CHECK_THROWS_AS(raise(ncclInvalidUsage,
                          "NCCL version mismatch with remote peer 127.0.0.1<41716> (local: 22707, "
                          "remote 22809)"),
                    mismatch_error);
    CHECK_THROWS_WITH_AS(raise(ncclInvalidUsage, "Duplicate GPU detected : rank 0 and rank 1"),
                         doctest::Contains("NCCL_HOSTID"), usage_error);
    try {
        raise(ncclInvalidUsage,
              "Mismatched NCCL version detected : rank 0 version 22809 rank 1 version 22707");
        FAIL("it threw nothing");
    } catch (const mismatch_error& failed) {
        const std::string text = failed.what();
        CHECK(text.find("2.99.1") != std::string::npos);
        CHECK(text.find("by its path") != std::string::npos);
        CHECK(text.find("rank 1 version 22707") != std::string::npos);
        CHECK(text.find("a word of the fake") != std::string::npos);
        CHECK(failed.context().peer == "rank 1");
        CHECK(failed.context().native_code == static_cast<int>(ncclInvalidUsage));
    }
    CHECK_NOTHROW(nccl_api::check(used, ncclSuccess, "ncclExample", 0));
    CHECK_NOTHROW(nccl_api::check(used, ncclInProgress, "ncclExample", 0));
    CHECK_THROWS_AS(nccl_api::check(used, ncclInvalidArgument, "ncclExample", 0), usage_error);
}

TEST_CASE("words of NCCL from before a call do not tell what the call met") {
    const auto used = library::open(beside("libfake_nccl_a.so"));
    const last_words_of_fake said{"Mismatched NCCL version detected : rank 0 version 22809"};
    const auto before = nccl_api::detail::digest_of_words(used);
    CHECK(nccl_api::detail::words_since(used, before).empty());
    CHECK_THROWS_AS(nccl_api::check(used, ncclRemoteError, "ncclExample", before), peer_error);
    {
        const last_words_of_fake later{"NCCL version mismatch with remote peer"};
        CHECK(nccl_api::detail::words_since(used, before) ==
              "NCCL version mismatch with remote peer");
        CHECK_THROWS_AS(nccl_api::check(used, ncclRemoteError, "ncclExample", before),
                        mismatch_error);
    }
}

TEST_CASE("a record of another size means other versions only while ranks meet") {
    const auto used = library::open(beside("libfake_nccl_a.so"));
    const auto raise = [&](phase in) {
        nccl_api::throw_failure(used, ncclRemoteError, "ncclExample",
                                "Message truncated : received 8 bytes instead of 4", {.phase = in});
    };
    CHECK_THROWS_AS(raise(phase::init), mismatch_error);
    CHECK_THROWS_AS(raise(phase::update), peer_error);
}

TEST_CASE("only ranks that cannot all come shorten a join") {
    using nccl_api::detail::tells_of_check_in;
    CHECK(tells_of_check_in("Bootstrap Root : mismatch in rank count from procs 2 : 3"));
    CHECK(
        tells_of_check_in("Bootstrap Root : mismatch in info from procs, nranks 2 vs 3, nroots 1 "
                          "vs 1, iroot 0 vs 0"));
    CHECK(tells_of_check_in("Bootstrap Root : rank 1 of 3 ranks has already checked in"));
    CHECK_FALSE(tells_of_check_in("Bootstrap Root : connection closed by remote peer"));
    CHECK_FALSE(tells_of_check_in("rank 1 has already checked in elsewhere"));
}

TEST_CASE("a device whose communicator was lost stays marked, and no other is") {
    CHECK_FALSE(gpu::lost_devices::has(41));
    gpu::lost_devices::note(41);
    CHECK(gpu::lost_devices::has(41));
    CHECK_FALSE(gpu::lost_devices::has(40));
    CHECK_FALSE(gpu::lost_devices::has(42));
}

TEST_CASE("an abort that does not return is given up after its bound") {
    const auto used = library::open(beside("libfake_nccl_a.so"));
    CHECK_FALSE(nccl_api::detail::abort_within(used, nullptr, 0, std::chrono::milliseconds{50}));
}

TEST_CASE("each element type has NCCL's number, a size and a word; other dtypes have none") {
    using nccl_api::element;
    CHECK(nccl_api::element_of(dtype::bf16) == element::bfloat16);
    CHECK(static_cast<int>(element::bfloat16) == static_cast<int>(ncclBfloat16));
    CHECK(nccl_api::element_of(dtype::f8_e4m3fn) == element::float8_e4m3fn);
    CHECK_FALSE(nccl_api::element_of(dtype::boolean).has_value());
    CHECK_FALSE(nccl_api::element_of(dtype::i16).has_value());
    CHECK_FALSE(nccl_api::element_of(dtype::complex64).has_value());
    for (const auto& each : dtype_table) {
        if (const auto type = nccl_api::element_of(each.value)) {
            CHECK(8 * nccl_api::size_of(*type) == each.item_bits);
            CHECK(nccl_api::to_string(*type) == each.torch);
        }
    }
}
