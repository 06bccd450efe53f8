// SPDX-License-Identifier: Apache-2.0
//
// Prints `{"checksums":{name: digest}}` of a checkpoint, as `push_checkpoint --vary` would have
// changed it for a version: what `/weight_checker` of a worker must answer. Speaks to nobody.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include <weightwire/core/digest.hpp>
#include <weightwire/sources/safetensors.hpp>

#include "support/round_key.hpp"

int main(int argc, char** argv) {
    std::string path;
    std::uint64_t seed = 0;
    std::uint64_t version = 0;
    CLI::App app{"Digests of a safetensors checkpoint."};
    app.add_option("checkpoint", path, "a .safetensors file, an index, or a folder with either")
        ->required();
    const auto* const vary =
        app.add_option("--vary", seed, "the seed that push_checkpoint was given");
    app.add_option("--version", version, "the version that push_checkpoint sent");
    CLI11_PARSE(app, argc, argv);
    try {
        const weightwire::safetensors_source checkpoint{path};
        const auto key = examples::round_key(seed, version);
        auto checksums = nlohmann::json::object();
        std::vector<std::byte> changed;
        for (const auto& [name, tensor, stream] : checkpoint.weights()) {
            changed.assign(tensor.data(), tensor.data() + tensor.byte_size());
            if (vary->count() != 0) {
                examples::apply_round_key(changed, 0, key);
            }
            checksums[std::string{name}] = weightwire::digest_text(weightwire::digest(changed));
        }
        fmt::print("{}\n", nlohmann::json{{"checksums", checksums}}.dump());
    } catch (const std::exception& failed) {
        fmt::print(stderr, "checkpoint_digests: {}\n", failed.what());
        return 1;
    }
    return 0;
}
