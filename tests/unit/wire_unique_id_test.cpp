// SPDX-License-Identifier: Apache-2.0

// The pickled unique id against golden files that CPython wrote, against the CPython that runs the
// tests, and against everything else that a store might hold.

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/wire/unique_id.hpp>

namespace {

using namespace weightwire;
using wire::unique_id;

const std::string tests_directory{WEIGHTWIRE_TESTS_DIRECTORY};

std::string golden(const std::string& name) {
    std::ifstream file{tests_directory + "/protocol/golden/nccl/" + name, std::ios::binary};
    REQUIRE_MESSAGE(file.good(), "golden file is missing: " << name);
    return {std::istreambuf_iterator<char>{file}, std::istreambuf_iterator<char>{}};
}

unique_id golden_id() {
    unique_id id;
    for (std::size_t i = 0; i < id.size(); ++i) {
        id[i] = static_cast<std::byte>(7 * i + 3);
    }
    return id;
}

unique_id random_id(std::mt19937& random) {
    unique_id id;
    for (auto& byte : id) {
        byte = static_cast<std::byte>(random());
    }
    return id;
}

std::string bytes_of(const unique_id& id) {
    return {reinterpret_cast<const char*>(id.data()), id.size()};
}

std::string hex(std::string_view bytes) {
    constexpr std::string_view digits = "0123456789abcdef";
    std::string out;
    for (const char c : bytes) {
        out += digits[static_cast<unsigned char>(c) >> 4U];
        out += digits[static_cast<unsigned char>(c) & 0xFU];
    }
    return out;
}

std::string from_hex(std::string_view text) {
    std::string out;
    for (std::size_t i = 0; i + 1 < text.size(); i += 2) {
        out += static_cast<char>(std::stoi(std::string{text.substr(i, 2)}, nullptr, 16));
    }
    return out;
}

/// What CPython's side says, decoded.
std::string python(const std::string& arguments) {
    const auto command =
        "python3 '" + tests_directory + "/support/pickled_unique_id.py' " + arguments;
    FILE* const pipe = ::popen(command.c_str(), "r");
    REQUIRE(pipe != nullptr);
    std::string out;
    for (int c = std::fgetc(pipe); c != EOF && c != '\n'; c = std::fgetc(pipe)) {
        out += static_cast<char>(c);
    }
    REQUIRE_MESSAGE(::pclose(pipe) == 0, "python3 failed: " << arguments.substr(0, 16));
    return from_hex(out);
}

/// The message of the protocol_error that reading `pickle` throws.
std::string refusal(std::string_view pickle) {
    try {
        (void)wire::unique_id_from_pickle(pickle);
    } catch (const protocol_error& cause) {
        CHECK(cause.context().phase == phase::init);
        return cause.what();
    }
    FAIL("nothing was refused");
    return {};
}

bool contains(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

std::string replaced(std::string text, std::string_view what, std::string_view by) {
    const auto at = text.find(what);
    REQUIRE(at != text.npos);
    return text.replace(at, what.size(), by);
}

TEST_CASE("unique id: our pickle is the smallest form, byte for byte") {
    const auto pickle = wire::pickle_of(golden_id());
    CHECK(pickle.size() == 227);
    CHECK(pickle == golden("unique_id.pickle"));
    CHECK(pickle.substr(95, 128) == bytes_of(golden_id()));
    CHECK(wire::unique_id_from_pickle(pickle) == golden_id());
}

TEST_CASE("unique id: what CPython wrote is read, protocols 2 to 5") {
    CHECK(golden("unique_id_python_4.pickle").size() == 247);
    CHECK(golden("unique_id_python_4.pickle").substr(111, 128) == bytes_of(golden_id()));
    for (const auto* protocol : {"2", "3", "4", "5"}) {
        CAPTURE(protocol);
        CHECK(wire::unique_id_from_pickle(
                  golden("unique_id_python_" + std::string{protocol} + ".pickle")) == golden_id());
    }
}

TEST_CASE("unique id: this machine's CPython and we read each other") {
    std::mt19937 random{5};
    for (const auto* protocol : {"2", "3", "4", "5"}) {
        CAPTURE(protocol);
        const auto id = random_id(random);
        const auto theirs = python("write " + std::string{protocol} + " " + hex(bytes_of(id)));
        CHECK(wire::unique_id_from_pickle(theirs) == id);
    }
    const auto id = random_id(random);
    CHECK(python("read " + hex(wire::pickle_of(id))) == bytes_of(id));
}

TEST_CASE("unique id: values that were remembered may be recalled, in either width") {
    using namespace std::string_view_literals;
    // Bytes first, remembered under a number and left on the stack: too many values at the end, but
    // only there, so that recalling them worked.
    const auto with = [](std::string_view put, std::string_view get) {
        auto text = wire::pickle_of(golden_id());
        const auto bytes = text.substr(93, 130);
        text.replace(93, 130, get);
        return text.insert(2, bytes + std::string{put});
    };
    CHECK(contains(refusal(with("q\0"sv, "h\0"sv)), "left over"));
    CHECK(contains(refusal(with("r\0\0\0\0"sv, "j\0\0\0\0"sv)), "left over"));
    CHECK(contains(refusal(with("\x94"sv, "h\0"sv)), "left over"));
    CHECK(contains(refusal(with("q\0q\x01"sv, "j\x01\0\0\0"sv)), "left over"));
    CHECK(contains(refusal(with("q\0q\0"sv, "h\0"sv)), "left over"));  // again under the same one
    CHECK(contains(refusal(with("q\0"sv, "h\x01"sv)), "nothing was remembered as 1"));
    CHECK(contains(refusal(with("r\0\x01\0\0"sv, "h\0"sv)), "remembers as 256"));
    CHECK(contains(refusal(with("q\x09"sv, "h\x09"sv)),
                   "opcode 0x71 at offset 132: it remembers as 9 where 0 are remembered"));
}

TEST_CASE("unique id: whatever else a pickle does is refused with its opcode and offset") {
    using namespace std::string_view_literals;
    CHECK(contains(refusal("\x80\x04(."sv), "opcode 0x28 at offset 2"));
    CHECK(contains(refusal("\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02id\x8c\x02id\x86R."sv),
                   "opcode 0x52 at offset 24: it calls something else"));
    CHECK(contains(refusal("\x80\x04"
                           "cos\nsystem\n\x8c\x02id\x8c\x02id\x86R."sv),
                   "nothing is called"));
    CHECK(contains(refusal("\x80\x04i__main__\nx\n."sv), "opcode 0x69 at offset 2"));
    CHECK(contains(refusal("\x80\x04}\x81."sv), "opcode 0x81"));
    CHECK(contains(refusal(""sv), "end of text at offset 0"));
    CHECK(contains(refusal("\x80\x01."sv), "protocol 1 is none of 2 to 5"));
    CHECK(contains(refusal("\x80\x06."sv), "protocol 6"));
    CHECK(contains(refusal("}."sv), "opcode 0x7d at offset 0"));
    CHECK(contains(refusal("\x80\x04}."sv), "another kind"));
    CHECK(contains(refusal("\x80\x04."sv), "it takes 1 values where there are 0"));
    CHECK(contains(refusal("\x80\x04\x95\xff\0\0\0\0\0\0\0."sv), "frame is longer"));
    CHECK(contains(refusal("\x80\x04"
                           "B\xff\xff\xff\xff"sv),
                   "it needs 4294967295 bytes, 0 are left"));
    CHECK(contains(refusal("\x80\x04"
                           "cos"sv),
                   "its line does not end"));
}

TEST_CASE("unique id: another class, size, state or shape is refused") {
    const auto pickle = wire::pickle_of(golden_id());
    CHECK(contains(refusal(replaced(pickle, "ncclUniqueId", "ncclUniqueIe")), "not of the class"));
    CHECK(contains(refusal(replaced(pickle, "vllm.dist", "evil.dist")), "not of the class"));
    CHECK(contains(refusal(replaced(pickle, "_unpickle", "_unpickld")), "calls something else"));
    auto short_id = pickle;
    short_id.erase(95, 1);
    short_id[94] = '\x7F';
    CHECK(contains(refusal(short_id), "127 bytes, expected 128"));
    CHECK(contains(refusal(pickle + "."), "bytes after the end"));
    CHECK(contains(refusal(replaced(pickle, "\x80\x04", "\x80\x04}")), "left over"));
    for (std::size_t length = 0; length < pickle.size(); ++length) {
        (void)refusal(std::string_view{pickle}.substr(0, length));
    }
}

TEST_CASE("unique id: depth, steps and length are bounded") {
    CHECK(contains(refusal("\x80\x04" + std::string(64, '}') + "."), "more than 8 values"));
    std::string turning{"\x80\x04}"};
    for (int i = 0; i < 400; ++i) {
        turning += "q";
        turning += '\0';
    }
    CHECK(contains(refusal(turning + "."), "128 allowed"));
    CHECK(contains(refusal(std::string(5000, '\x80')), "has 5000 bytes"));
}

TEST_CASE("unique id: changing any byte of a pickle gives another id or a refusal") {
    for (const auto* name :
         {"unique_id.pickle", "unique_id_python_2.pickle", "unique_id_python_4.pickle"}) {
        const auto pickle = golden(name);
        std::size_t refused = 0;
        for (std::size_t i = 0; i < pickle.size(); ++i) {
            auto changed = pickle;
            changed[i] = static_cast<char>(changed[i] ^ 0x10);
            try {
                (void)wire::unique_id_from_pickle(changed);
            } catch (const protocol_error&) {
                ++refused;
            }
        }
        CHECK(refused >= 80);  // all but the id's bytes and the numbers of the memo
    }
}

TEST_CASE("unique id: base64 is the standard alphabet, padded and of 128 bytes") {
    std::mt19937 random{6};
    for (int repeat = 0; repeat < 200; ++repeat) {
        const auto id = random_id(random);
        const auto text = wire::base64_of(id);
        REQUIRE(text.size() == 172);
        REQUIRE(wire::unique_id_from_base64(text) == id);
    }
    unique_id ones;
    ones.fill(std::byte{0xFF});
    auto text = wire::base64_of(ones);
    CHECK(text.starts_with("////"));
    CHECK_THROWS_AS((void)wire::unique_id_from_base64(replaced(text, "/", "_")), protocol_error);
    CHECK_THROWS_AS((void)wire::unique_id_from_base64(replaced(text, "/", " ")), protocol_error);
    CHECK_THROWS_AS((void)wire::unique_id_from_base64(text + "AAAA"), protocol_error);
    CHECK_THROWS_AS((void)wire::unique_id_from_base64(text.substr(0, 171)), protocol_error);
    CHECK_THROWS_AS((void)wire::unique_id_from_base64(""), protocol_error);
    text.back() = '/';  // 129 bytes
    try {
        (void)wire::unique_id_from_base64(text);
        FAIL("129 bytes were taken");
    } catch (const protocol_error& cause) {
        CHECK(contains(cause.text(), "128"));
    }
}

}  // namespace
