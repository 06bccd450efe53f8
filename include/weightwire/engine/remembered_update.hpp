#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <memory>
#include <utility>

#include <weightwire/wire/vllm_requests.hpp>

/// @file
/// What vLLM's trainers from 0.33 on leave out: an update that names no parameters means those of
/// the update before it.

namespace weightwire::detail {

/// The last vLLM-form update that named parameters, since the last init.
class remembered_update {
public:
    using request = std::shared_ptr<const wire::vllm_update_request>;

    /// What `sent` means: itself, or the one before it when it names nothing.
    [[nodiscard]] request meaning_of(const request& sent) {
        if (sent == nullptr) {
            return sent;
        }
        const bool names_none = !sent->per_worker && sent->entries.front().parameters.size() == 0;
        if (!names_none) {
            last_ = sent;
        }
        return names_none && last_ != nullptr ? last_ : sent;
    }
    void forget() noexcept { last_ = nullptr; }

private:
    request last_;
};

}  // namespace weightwire::detail
