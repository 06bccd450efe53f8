#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <memory>
#include <utility>

#include <weightwire/fabrics/ucx/links.hpp>
#include <weightwire/fabrics/ucx/worker.hpp>

/// @file
/// What a reader has opened.

namespace weightwire::ucx {

/// Memory of a trainer rank.
class memory {
public:
    memory(std::shared_ptr<links> in, const link& of, const remote_key& key, std::uint64_t address,
           std::uint64_t size) noexcept
        : in_{std::move(in)}, of_{&of}, key_{&key}, address_{address}, size_{size} {}
    memory(memory&& other) noexcept = default;
    memory& operator=(memory&& other) noexcept {
        std::swap(in_, other.in_);
        std::swap(of_, other.of_);
        std::swap(key_, other.key_);
        std::swap(address_, other.address_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~memory() {
        if (in_ != nullptr) {
            in_->forget(*key_);
        }
    }

    [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
    /// In the trainer rank's process.
    [[nodiscard]] std::uint64_t address() const noexcept { return address_; }
    [[nodiscard]] const link& of() const noexcept { return *of_; }
    [[nodiscard]] const remote_key& key() const noexcept { return *key_; }

private:
    std::shared_ptr<links> in_;
    const link* of_;
    const remote_key* key_;
    std::uint64_t address_;
    std::uint64_t size_;
};

}  // namespace weightwire::ucx
