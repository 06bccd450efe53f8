// SPDX-License-Identifier: Apache-2.0
//
// A checkpoint that somebody damages while a round is being sent. The trainer is a process of its
// own: what must not happen is that a signal ends it.

#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/backends/ipc/backend.hpp>
#include <weightwire/engine/local_sync_client.hpp>
#include <weightwire/sources/safetensors.hpp>
#include <weightwire/weightwire.hpp>

#include "../support/forked.hpp"
#include "../support/safetensors_file.hpp"
#include "../support/temporary_folder.hpp"

namespace {

using namespace std::chrono_literals;
using namespace weightwire;

constexpr std::size_t tensor_bytes = std::size_t{1} << 20U;

/// Three tensors of a MiB each: `a`, `b`, `c`.
std::string three_tensors() {
    std::string header;
    for (std::size_t i = 0; i < 3; ++i) {
        header += header.empty() ? "{\"" : ",\"";
        header += static_cast<char>('a' + i);
        header += R"(":{"dtype":"U8","shape":[)" + std::to_string(tensor_bytes) +
                  R"(],"data_offsets":[)" + std::to_string(i * tensor_bytes) + "," +
                  std::to_string((i + 1) * tensor_bytes) + "]}";
    }
    return test_support::safetensors_bytes(header + "}", 3 * tensor_bytes);
}

/// Says that tensor `b` is under way, once, and waits until the other process has done its damage.
struct pause_in_b {
    tests::channel* other;
    bool paused = false;

    static void run(void* self, std::string_view tensor, std::uint64_t, std::span<std::byte>) {
        auto& pause = *static_cast<pause_in_b*>(self);
        if (tensor == "b" && !pause.paused) {
            pause.paused = true;
            pause.other->put('b');
            static_cast<void>(pause.other->take<char>());
        }
    }
};

/// A trainer and a worker; leaves what the round ended with, and what the worker serves then.
tests::forked trainer(const std::string& path, bool packed) {
    return tests::forked{[path, packed](tests::channel& other) {
        const safetensors_source checkpoint{path};
        parameter_table table{
            std::vector<param_meta>{checkpoint.metadata().begin(), checkpoint.metadata().end()}};
        worker_engine worker{ipc::backend{}, table};
        worker_service service{worker};
        local_sync_client client{service};
        pause_in_b pause{&other};
        auto engine = trainer_init(ipc::trainer_init_info{.packed = packed,
                                                          .packed_buffer_size_bytes = tensor_bytes,
                                                          .verify = true,
                                                          .transform = {&pause_in_b::run, &pause}},
                                   client, checkpoint, {.init_budget = 20s, .send_budget = 20s});
        std::string text = "the round ended well";
        try {
            engine.send_weights();
        } catch (const data_error& failed) {
            text = failed.what();
        }
        other.put_text(text + "; it serves version " + std::to_string(table.version()));
    }};
}

#define CHECK_SAYS(text, ...) CHECK_MESSAGE((text).find(__VA_ARGS__) != std::string::npos, text)

}  // namespace

TEST_CASE(
    "a checkpoint cut short in the middle of a round is one error that names file and tensor") {
    for (const bool packed : {false, true}) {
        CAPTURE(packed);
        const test_support::temporary_folder folder;
        const auto content = three_tensors();
        const auto path = folder.write("m.safetensors", content);
        auto process = trainer(path, packed);
        REQUIRE(process.to().take<char>() == 'b');
        std::filesystem::resize_file(path, content.size() - tensor_bytes - tensor_bytes / 2);
        process.to().put('g');
        const auto text = process.to().rest();
        CHECK_SAYS(text, "data [phase update]");
        CHECK_SAYS(text, "[tensor b]");
        CHECK_SAYS(text, "m.safetensors: the file ends at byte");
        CHECK_SAYS(text, "replace a checkpoint by renaming");
        CHECK_SAYS(text, "; it serves version 0");
    }
}

TEST_CASE("a checkpoint written into in the middle of a round is found before the round ends") {
    const test_support::temporary_folder folder;
    const auto path = folder.write("m.safetensors", three_tensors());
    auto process = trainer(path, false);
    REQUIRE(process.to().take<char>() == 'b');
    std::filesystem::last_write_time(path, std::filesystem::last_write_time(path) + 1s);
    process.to().put('g');
    const auto text = process.to().rest();
    CHECK_SAYS(text, "[tensor b]");
    CHECK_SAYS(text, "m.safetensors: the file was written to after it was opened");
    CHECK_SAYS(text, "; it serves version 0");
}

TEST_CASE("a checkpoint replaced by renaming in the middle of a round does not disturb it") {
    const test_support::temporary_folder folder;
    const auto path = folder.write("m.safetensors", three_tensors());
    auto process = trainer(path, false);
    REQUIRE(process.to().take<char>() == 'b');
    std::filesystem::rename(folder.write("next.safetensors", "{}"), path);
    process.to().put('g');
    CHECK(process.to().rest() == "the round ended well; it serves version 1");
}

TEST_CASE("a source reads its tensors from the file, and nothing else") {
    const test_support::temporary_folder folder;
    const safetensors_source source{folder.write("m.safetensors", three_tensors())};
    for (const auto& entry : source.weights()) {
        const std::size_t offset = 1000;
        std::vector<std::byte> bytes(tensor_bytes - offset);
        source.read(entry, offset, bytes);
        CHECK(std::ranges::equal(bytes, entry.tensor.bytes().subspan(offset)));
        CHECK_THROWS_AS(source.read(entry, offset + 1, bytes), usage_error);
        CHECK_THROWS_AS(source.read(entry, tensor_bytes + 1, std::span{bytes}.first(0)),
                        usage_error);
        const named_tensor stranger{entry.name, {bytes.data(), dtype::u8, {8}}};
        CHECK_THROWS_AS(source.read(stranger, 0, std::span{bytes}.first(1)), usage_error);
    }
}
