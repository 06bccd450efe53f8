#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include <weightwire/core/digest.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>

namespace tests {

/// `count` parameters of `elements` floats each, in layers of two.
inline std::vector<weightwire::param_meta> small_model(int count, int elements) {
    std::vector<weightwire::param_meta> out;
    for (int i = 0; i < count; ++i) {
        out.push_back(
            {"model.layers." + std::to_string(i / 2) + (i % 2 == 0 ? ".up.weight" : ".down.weight"),
             weightwire::dtype::f32,
             {elements}});
    }
    return out;
}

/// Fills a tensor so that every word tells version, parameter and position.
inline void fill(std::span<std::byte> bytes, std::uint64_t version, std::size_t parameter) {
    std::uint32_t word = static_cast<std::uint32_t>(version * 2654435761U + parameter * 40503U + 1);
    for (std::size_t at = 0; at + 4 <= bytes.size(); at += 4) {
        word = word * 1664525U + 1013904223U;
        std::memcpy(bytes.data() + at, &word, 4);
    }
}

/// The weights of a trainer in ordinary memory, refilled every round.
class small_weights {
public:
    small_weights(int count, int elements) : metadata_{small_model(count, elements)} {
        for (const auto& parameter : metadata_) {
            memory_.emplace_back(parameter.byte_size());
            tensors_.push_back(
                {parameter.name, {memory_.back().data(), parameter.dtype, parameter.shape}});
        }
        set(0);
    }
    void set(std::uint64_t version) {
        for (std::size_t i = 0; i < memory_.size(); ++i) {
            fill(memory_[i], version, i);
        }
    }
    [[nodiscard]] const std::vector<weightwire::param_meta>& metadata() const { return metadata_; }
    [[nodiscard]] const std::vector<weightwire::named_tensor>& weights() const { return tensors_; }
    /// What a worker's `/weight_checker` must say of parameter `i`.
    [[nodiscard]] std::string digest_of(std::size_t i) const {
        return weightwire::digest_text(weightwire::digest(memory_[i]));
    }

private:
    std::vector<weightwire::param_meta> metadata_;
    std::vector<std::vector<std::byte>> memory_;
    std::vector<weightwire::named_tensor> tensors_;
};

}  // namespace tests
