#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <string>
#include <string_view>

#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/convert.hpp>
#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>

/// @file
/// What becomes of a parameter whose dtype is not that of its destination.

namespace weightwire::detail {

/// Says whether a backend may be given a destination of another dtype than the parameter's. Its
/// receiver would else compare sizes at most, and move `f16` into `bf16` bit for bit.
class conversion_rule {
public:
    /// Nothing is converted, by a backend without a name.
    conversion_rule() = default;

    template <class Tag>
    [[nodiscard]] static conversion_rule of() noexcept {
        constexpr auto capabilities = backend_traits<Tag>::capabilities;
        conversion_rule made;
        made.backend_ = backend_traits<Tag>::wire_name;
        if constexpr (requires { capabilities.converts; }) {
            made.converts_ = capabilities.converts;
        }
        return made;
    }

    /// @param sent what the trainer sends, whose dtype is not `held`.
    /// @param rank of the worker, -1 where it has one.
    /// @throws mismatch_error the backend does not convert, or no backend does; names both.
    void require(const param_meta& sent, dtype held, phase where, int rank = -1) const {
        if (converts_ && can_convert(sent.dtype, held)) {
            return;
        }
        throw mismatch_error{
            "the trainer sends " + std::string{to_string(sent.dtype)} + ", the worker holds " +
                std::string{to_string(held)} +
                (converts_ ? ", and there is no conversion between them"
                           : ", and this backend moves bytes as they are; send what the worker "
                             "holds, or choose a backend that converts (cuda_ipc)"),
            {.phase = where, .tensor = sent.name, .backend = std::string{backend_}, .rank = rank}};
    }

private:
    std::string_view backend_;
    bool converts_ = false;
};

}  // namespace weightwire::detail
