#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <string>

#include <weightwire/wire/json_writer.hpp>

/// @file
/// What a trainer chooses for the loopback transport.

namespace weightwire::testing {

/// The tag.
struct loopback {};

/// What the trainer chooses.
struct loopback_init_info {
    using backend = loopback;
    int rank = 0;
    /// Update calls a round; fewer where there are fewer parameters.
    std::size_t parts = 1;
    /// Bytes of one piece of a tensor, a multiple of 8.
    std::size_t piece_bytes = std::size_t{256} << 10U;
    /// Send digests, which the worker compares before it commits.
    bool verify = true;
    /// Name of a `gate` that every `send` passes before it reads a tensor; empty for none.
    std::string block_before_send{};
    /// Name of a `gate` that `receive` passes before it takes a byte; empty for none.
    std::string block_in_receive{};
    /// Global rank that `block_in_receive` is for; -1 for all.
    int block_rank = -1;

    /// `{"block_in_receive":…,"block_rank":…}`.
    [[nodiscard]] std::string init_message() const {
        std::string out;
        wire::json_writer{out}
            .begin_object()
            .key("block_in_receive")
            .string(block_in_receive)
            .key("block_rank")
            .integer(block_rank)
            .end_object();
        return out;
    }
};

}  // namespace weightwire::testing
