// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>
#include <sys/stat.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/digest.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/sources/callback_source.hpp>
#include <weightwire/sources/safetensors.hpp>
#include <weightwire/sources/span_source.hpp>
#include <weightwire/testing/conformance/weight_source.hpp>

#include "../support/safetensors_file.hpp"
#include "../support/temporary_folder.hpp"

namespace {

using namespace weightwire;
using test_support::safetensors_bytes;
using test_support::temporary_folder;

/// One tensor of every dtype that the format spells, with different bytes.
struct every_dtype {
    std::vector<std::byte> memory = std::vector<std::byte>(dtype_table.size() * 256);
    std::vector<named_tensor> tensors{};

    every_dtype() {
        for (std::size_t i = 0; i < memory.size(); ++i) {
            memory[i] = static_cast<std::byte>(i * 31 / 7 & 0xFFU);
        }
        std::size_t offset = 0;
        for (const auto& row : dtype_table) {
            if (!row.safetensors.empty()) {
                tensors.push_back(
                    {row.safetensors, {memory.data() + offset, row.value, {2, 1, 4}}});
                offset += tensors.back().tensor.byte_size();
            }
        }
    }
};

struct in_folder {
    temporary_folder folder;

    /// The message of opening `name`, which names what is wrong.
    std::string refusal(std::string_view name, const safetensors_options& options = {}) const {
        try {
            const safetensors_source source{folder / name, options};
        } catch (const data_error& problem) {
            return problem.what();
        }
        return "nothing is wrong";
    }
};

std::string entry(std::string_view name, std::size_t begin, std::size_t end) {
    return "\"" + std::string{name} + R"(":{"dtype":"U8","shape":[)" + std::to_string(end - begin) +
           R"(],"data_offsets":[)" + std::to_string(begin) + "," + std::to_string(end) + "]}";
}

#define CHECK_SAYS(text, ...) CHECK_MESSAGE((text).find(__VA_ARGS__) != std::string::npos, text)

TEST_CASE_FIXTURE(in_folder,
                  "safetensors: what is written is read, every dtype, byte for byte, in order") {
    const every_dtype written;
    write_safetensors(folder / "all.safetensors", written.tensors, {{"format", "pt"}});
    safetensors_source source{folder / "all.safetensors"};
    REQUIRE(source.size() == written.tensors.size());
    for (std::size_t i = 0; i < source.size(); ++i) {
        CAPTURE(std::string{written.tensors[i].name});
        const auto& tensor = source.weights()[i];
        CHECK(tensor.name == written.tensors[i].name);
        CHECK(tensor.tensor.type() == written.tensors[i].tensor.type());
        CHECK(tensor.tensor.extents() == written.tensors[i].tensor.extents());
        CHECK(digest(tensor.tensor.bytes()) == digest(written.tensors[i].tensor.bytes()));
        CHECK(source.tensor(tensor.name).data() == tensor.tensor.data());
        CHECK(source.contains(tensor.name));
    }
    CHECK(source.files()[0].header().metadata.at("format") == "pt");
    CHECK(source.files()[0].header().data_begin % 8 == 0);
    CHECK_THROWS_AS((void)source.tensor("nobody"), usage_error);
    const auto report = testing::check_weight_source(source);
    CHECK_MESSAGE(report.passed(), report.text());
}

TEST_CASE_FIXTURE(in_folder,
                  "safetensors: the source reads the mapping, and views survive its move") {
    folder.write("m.safetensors", safetensors_bytes("{" + entry("a", 0, 64) + "}", 64));
    safetensors_source source{folder / "m.safetensors"};
    const auto* data = source.weights()[0].tensor.data();
    const auto* name = source.weights()[0].name.data();
    safetensors_source moved = std::move(source);
    CHECK(moved.weights()[0].tensor.data() == data);
    CHECK(moved.weights()[0].name.data() == name);
    CHECK(moved.weights()[0].tensor.bytes()[63] == std::byte{63});
    folder.write("n.safetensors", safetensors_bytes("{" + entry("b", 0, 8) + "}", 8));
    moved = safetensors_source{folder / "n.safetensors"};
    CHECK(moved.tensor("b").bytes()[7] == std::byte{7});
    CHECK_FALSE(moved.contains("a"));
}

/// Two shards and their index, in which each test changes one thing.
struct sharded : in_folder {
    std::map<std::string, std::string> weight_map{
        {"x", "s-2.safetensors"}, {"y", "s-1.safetensors"}, {"z", "s-2.safetensors"}};
    std::uint64_t total = 24;

    sharded() {
        folder.write("s-1.safetensors", safetensors_bytes("{" + entry("y", 0, 8) + "}", 8));
        folder.write("s-2.safetensors",
                     safetensors_bytes("{" + entry("x", 8, 16) + "," + entry("z", 0, 8) + "}", 16));
        write();
    }
    void write() const {
        write_safetensors_index(folder / "model.safetensors.index.json", weight_map, total);
    }
    std::string refused(const safetensors_options& options = {}) const {
        write();
        return refusal("model.safetensors.index.json", options);
    }
};

TEST_CASE_FIXTURE(sharded,
                  "sharded checkpoint: files by name, tensors by offset, from index or folder") {
    for (const std::string& path :
         {folder / "model.safetensors.index.json", folder.path(), folder.path() + "/"}) {
        CAPTURE(path);
        safetensors_source source{path};
        std::string order;
        for (const auto& each : source.weights()) {
            order += each.name;
        }
        CHECK(order == "yzx");
        CHECK(source.files().size() == 2);
        CHECK(source.tensor("x").bytes()[0] == std::byte{8});
        const auto report = testing::check_weight_source(source);
        CHECK_MESSAGE(report.passed(), report.text());
    }
}

TEST_CASE_FIXTURE(sharded,
                  "sharded checkpoint: shards and index must agree, and what does not is named") {
    CHECK(refused() == "nothing is wrong");
    weight_map["w"] = "s-1.safetensors";
    CHECK_SAYS(refused(), "[tensor w]");
    CHECK_SAYS(refused(), "places this tensor in s-1.safetensors, which does not hold it");
    weight_map.erase("w");
    weight_map.erase("z");
    CHECK_SAYS(refused(), "[tensor z]");
    CHECK_SAYS(refused(), "s-2.safetensors: the file holds this tensor, which the index");
    weight_map["z"] = "s-1.safetensors";
    CHECK_SAYS(refused(), "places in s-1.safetensors");
    weight_map["z"] = "s-3.safetensors";
    CHECK_SAYS(refused(), "s-3.safetensors: the file cannot be opened");
    weight_map["z"] = "s-2.safetensors";
    total = 25;
    CHECK_SAYS(refused(), "metadata.total_size is 25, and the tensors have 24 bytes");
    CHECK(refused({.require_total_size = false}) == "nothing is wrong");
}

TEST_CASE_FIXTURE(sharded, "sharded checkpoint: a tensor in two shards is refused") {
    folder.write("s-1.safetensors",
                 safetensors_bytes("{" + entry("y", 0, 8) + "," + entry("x", 8, 16) + "}", 16));
    CHECK_SAYS(refused(), "[tensor x]");
    CHECK_SAYS(refused(), "places in s-2.safetensors");
}

TEST_CASE_FIXTURE(sharded, "sharded checkpoint: shards in a folder below the index are found") {
    std::filesystem::create_directory(folder / "parts");
    for (auto& [tensor, file] : weight_map) {
        if (std::filesystem::exists(folder / file)) {
            std::filesystem::rename(folder / file, folder / ("parts/" + file));
        }
        file = "parts/" + file;
    }
    CHECK(refused() == "nothing is wrong");
}

TEST_CASE_FIXTURE(in_folder,
                  "safetensors: a folder holds one checkpoint, or the error says what it lacks") {
    CHECK_SAYS(refusal(""), "holds neither model.safetensors nor");
    folder.write("model.safetensors", safetensors_bytes("{" + entry("a", 0, 8) + "}", 8));
    CHECK(refusal("") == "nothing is wrong");
    folder.write("model.safetensors.index.json", "{}");
    CHECK_SAYS(refusal(""), "holds both");
    CHECK(refusal("model.safetensors") == "nothing is wrong");
}

TEST_CASE_FIXTURE(
    in_folder, "safetensors: what cannot be opened or is no regular file is refused, and named") {
    const auto missing = refusal("missing.safetensors");
    CHECK_SAYS(missing, "missing.safetensors: the file cannot be opened for reading (code 2");
    std::filesystem::create_directory(folder / "d.json");
    CHECK_SAYS(refusal("d.json"), "holds neither");
    CHECK_THROWS_AS(mapped_file{"/dev/null"}, data_error);
    folder.write("empty.safetensors", "");
    CHECK_SAYS(refusal("empty.safetensors"), "empty.safetensors: the file has 0 bytes");
    folder.write("cut.safetensors", safetensors_bytes("{" + entry("a", 0, 64) + "}", 63));
    CHECK_SAYS(refusal("cut.safetensors"), "[tensor a]");
    CHECK_SAYS(refusal("cut.safetensors"), "it is truncated");
}

TEST_CASE_FIXTURE(in_folder,
                  "safetensors: a file cut short while it is open is refused at the next round") {
    const auto path =
        folder.write("m.safetensors", safetensors_bytes("{" + entry("a", 0, 64) + "}", 64));
    safetensors_source source{path};
    CHECK_NOTHROW((void)source.weights());
    std::filesystem::resize_file(path, 100);
    CHECK_THROWS_AS((void)source.weights(), data_error);
}

TEST_CASE_FIXTURE(in_folder,
                  "safetensors: a file overwritten at its size is refused at the next round") {
    const auto content = safetensors_bytes("{" + entry("a", 0, 64) + "}", 64);
    const auto path = folder.write("m.safetensors", content);
    const auto written = std::filesystem::last_write_time(path);
    safetensors_source source{path};
    auto moved = std::move(source);
    CHECK_NOTHROW((void)moved.weights());
    folder.write("m.safetensors", content);
    std::filesystem::last_write_time(path, written + std::chrono::nanoseconds{1});
    try {
        (void)moved.weights();
        FAIL("the file was written to");
    } catch (const data_error& problem) {
        CHECK_SAYS(std::string{problem.what()}, "m.safetensors: the file was written to after");
    }
}

TEST_CASE_FIXTURE(in_folder, "safetensors: a pipe is refused and does not wait for a writer") {
    const std::string path = folder / "p.safetensors";
    REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
    CHECK_SAYS(refusal("p.safetensors"), "p.safetensors: this is no regular file");
}

TEST_CASE_FIXTURE(in_folder,
                  "safetensors: a file replaced by renaming leaves an open source as it was") {
    const auto path =
        folder.write("m.safetensors", safetensors_bytes("{" + entry("a", 0, 64) + "}", 64));
    safetensors_source source{path};
    const auto before = digest(source.tensor("a").bytes());
    std::array<std::byte, 8> other{};
    write_safetensors(path, span_source{{"a", {other.data(), dtype::u8, {8}}}});
    CHECK(digest(source.weights()[0].tensor.bytes()) == before);
    CHECK(safetensors_source{path}.tensor("a").byte_size() == 8);
}

// --- the writer

TEST_CASE_FIXTURE(
    in_folder,
    "safetensors writer: a source that makes one tensor at a time is written as it comes") {
    std::array<std::uint32_t, 4> buffer{};
    callback_source source{{{"a", dtype::u32, {4}}, {"b", dtype::u32, {2, 2}}}, [&](std::size_t i) {
                               std::iota(buffer.begin(), buffer.end(),
                                         static_cast<std::uint32_t>(i * 100));
                               return tensor_view{reinterpret_cast<std::byte*>(buffer.data()),
                                                  dtype::u32, i == 0 ? shape{4} : shape{2, 2}};
                           }};
    write_safetensors(folder / "m.safetensors", source);
    const safetensors_source read{folder / "m.safetensors"};
    CHECK(read.tensor("a").bytes()[0] == std::byte{0});
    CHECK(read.tensor("b").bytes()[0] == std::byte{100});
}

TEST_CASE_FIXTURE(in_folder, "safetensors writer: names and metadata are escaped and come back") {
    std::byte memory{};
    const std::string name = "a\"\\.caf\xc3\xa9";
    write_safetensors(folder / "m.safetensors", span_source{{name, {&memory, dtype::u8, {}}}},
                      {{"k\n\"", std::string{"v\0\t", 3}}});
    const safetensors_source read{folder / "m.safetensors"};
    CHECK(read.contains(name));
    CHECK(read.files()[0].header().metadata.at("k\n\"") == std::string_view{"v\0\t", 3});
}

TEST_CASE_FIXTURE(in_folder,
                  "safetensors writer: what the format cannot say is refused, and leaves no file") {
    std::array<std::byte, 64> memory{};
    const auto refused = [&](const named_tensor& tensor) {
        try {
            write_safetensors(folder / "m.safetensors", span_source{tensor});
        } catch (const data_error& problem) {
            return std::string{problem.what()};
        }
        return std::string{"nothing is wrong"};
    };
    CHECK_SAYS(refused({"c", {memory.data(), dtype::complex128, {1}}}), "[tensor c]");
    CHECK_SAYS(refused({"f", {memory.data(), dtype::f4_e2m1_x2, {}}}), "no spelling");
    CHECK_SAYS(refused({"__metadata__", {memory.data(), dtype::u8, {1}}}), "no spelling");
    CHECK_SAYS(refused({"a\nb", {memory.data(), dtype::u8, {1}}}), "no spelling");
    CHECK_SAYS(refused({"\xff", {memory.data(), dtype::u8, {1}}}), "no UTF-8");
    CHECK_THROWS_AS(
        write_safetensors(folder / "m.safetensors",
                          span_source{{"t", {memory.data(), dtype::u8, {2, 2}, {1, 2}}}}),
        usage_error);
    CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE_FIXTURE(
    in_folder,
    "safetensors writer: tensors that are not the metadata's, too few or too many are refused") {
    std::array<std::byte, 8> memory{};
    const named_tensor a{"a", {memory.data(), dtype::u8, {8}}};
    const named_tensor b{"b", {memory.data(), dtype::u8, {4}}};
    const auto path = folder / "m.safetensors";
    {
        safetensors_writer writer{path, manifest{{{"a", dtype::u8, {8}}, {"b", dtype::u8, {4}}}}};
        CHECK_THROWS_AS(writer.append(b), data_error);
        CHECK_THROWS_AS(writer.append({"a", {memory.data(), dtype::i8, {8}}}), data_error);
        CHECK_THROWS_AS(writer.append({"a", {memory.data(), dtype::u8, {7}}}), data_error);
        writer.append(a);
        CHECK_THROWS_AS(writer.finish(), data_error);
        writer.append(b);
        CHECK_THROWS_AS(writer.append(b), data_error);
        CHECK_FALSE(std::filesystem::exists(path));
        writer.finish();
    }
    CHECK(safetensors_source{path}.size() == 2);
    CHECK(std::distance(std::filesystem::directory_iterator{folder.path()},
                        std::filesystem::directory_iterator{}) == 1);
}

TEST_CASE("safetensors writer: a place that cannot be written is refused, and named") {
    try {
        write_safetensors("/nonexistent-folder/m.safetensors", span_source{});
        FAIL("there is no such folder");
    } catch (const resource_error& problem) {
        CHECK(std::string{problem.what()}.find("/nonexistent-folder/m.safetensors") !=
              std::string::npos);
        CHECK(problem.context().operation == "open");
        CHECK(problem.context().native_code == 2);
    }
}

}  // namespace
