// SPDX-License-Identifier: Apache-2.0
// Any bytes as a safetensors file, and as an index: each is either refused with a data_error or
// read into a table that holds together.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/sources/safetensors_header.hpp>
#include <weightwire/sources/safetensors_index.hpp>

namespace {

using namespace weightwire;

void require(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "safetensors_fuzz: %s\n", what);
        std::abort();
    }
}

void check_header(std::span<const std::byte> file, const safetensors_header& header) {
    require(header.data_begin <= file.size(), "the data begins past the end");
    std::uint64_t covered = 0;
    std::vector<param_meta> parameters;
    for (const auto& entry : header.tensors) {
        require(entry.begin == covered && entry.end >= entry.begin, "the data is not covered once");
        require(entry.end - entry.begin == entry.meta.byte_size(), "a span is no tensor's size");
        covered = entry.end;
        parameters.push_back(entry.meta);
    }
    require(covered == file.size() - header.data_begin, "the data is not covered to its end");
    require(manifest{parameters}.total_bytes() == covered, "no manifest can be made of it");
}

void check_index(const safetensors_index& index) {
    require(std::ranges::is_sorted(index.files), "files are not sorted");
    for (const auto& [tensor, shard] : index.shard_of) {
        require(!tensor.empty() && shard < index.files.size(), "a tensor has no shard");
    }
    for (const auto& file : index.files) {
        require(!file.empty() && file.front() != '/', "a shard is not below the index's folder");
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::span bytes{reinterpret_cast<const std::byte*>(data), size};
    try {
        check_header(bytes, parse_safetensors_header(bytes, "fuzz"));
    } catch (const data_error&) {
        // Refused: what a bad file deserves. Anything else that is thrown is a finding.
    }
    try {
        check_index(parse_safetensors_index(bytes, "fuzz"));
    } catch (const data_error&) {
    }
    return 0;
}
