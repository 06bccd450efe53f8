#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/ownership.hpp>
#include <weightwire/plan/pull_needs.hpp>
#include <weightwire/plan/pull_plan.hpp>
#include <weightwire/plan/pull_reads.hpp>
#include <weightwire/plan/pull_routing.hpp>

/// @file
/// The three messages of planning: what a worker needs, its route, and what it asks of an owner.
///
/// Each begins with the three bytes `W P 1` and a letter. Numbers are unsigned, seven bits a byte,
/// the lowest first, in as few bytes as they need; hashes are eight bytes, the lowest first.
/// Ascending numbers are written as differences. One message has one spelling. Encoded messages
/// hold any byte: where a text carries them, use base64.
///
/// - `N` needs: count, then of each position, bytes, hash.
/// - `R` route: worker, smallest piece; count of classes, of each its index, count of shares, of
///   each owner and bytes; count of shared pieces, of each position, begin, length, ingester,
///   owner.
/// - `P` part: worker, owner, hash of the list; count of sections, of each ingester + 1; count of
///   reads, of each source, offset, count of dimensions, of each extent and stride; count of
///   chunks, of each group, count of reads, bytes.
///
/// What decoding checks is that the message is one, and that no list in it is longer than its bytes
/// and no number larger than its type: a decoded message takes at most 40 times the memory of its
/// bytes. What it says is for `plan::route`, `plan::plan_worker` and `plan::part_checker` to check.

namespace weightwire::wire {

namespace detail {

class plan_writer {
public:
    explicit plan_writer(char kind) { out_ = {'W', 'P', '1', kind}; }

    template <std::unsigned_integral T>
    plan_writer& number(T value) {
        auto left = static_cast<std::uint64_t>(value);
        for (; left >= 0x80U; left >>= 7U) {
            out_ += static_cast<char>(0x80U | (left & 0x7FU));
        }
        out_ += static_cast<char>(left);
        return *this;
    }
    /// What a plan made is never negative.
    template <std::signed_integral T>
    plan_writer& number(T value) {
        if (value < 0) {
            throw usage_error{"a plan for the wire has a negative number", {.phase = phase::plan}};
        }
        return number(static_cast<std::uint64_t>(value));
    }
    /// A number that is at least `least`; the next one may be as small as one above this.
    plan_writer& ascending(std::size_t value, std::size_t least) {
        if (value < least) {
            throw usage_error{"a plan for the wire is not in order", {.phase = phase::plan}};
        }
        return number(value - least);
    }
    plan_writer& hash(std::uint64_t value) {
        for (unsigned shift = 0; shift < 64; shift += 8) {
            out_ += static_cast<char>(value >> shift & 0xFFU);
        }
        return *this;
    }
    plan_writer& text(std::string_view value) {
        number(value.size());
        out_ += value;
        return *this;
    }
    /// Another message, at the end of this one.
    plan_writer& rest(std::string_view message) {
        out_ += message;
        return *this;
    }
    [[nodiscard]] std::string take() && { return std::move(out_); }

private:
    std::string out_;
};

class plan_reader {
public:
    /// @param what the message is called in errors.
    plan_reader(std::string_view bytes, char kind, std::string_view what)
        : bytes_{bytes}, what_{what} {
        for (const char expected : {'W', 'P', '1', kind}) {
            if (byte() != static_cast<unsigned char>(expected)) {
                fail("begins with other bytes than it should");
            }
        }
    }

    [[noreturn]] void fail(const std::string& why) const {
        throw protocol_error{std::string{what_} + " " + why + ", at byte " + std::to_string(at_) +
                                 " of " + std::to_string(bytes_.size()),
                             {.phase = phase::plan}};
    }
    [[nodiscard]] std::uint64_t number(
        std::uint64_t most = std::numeric_limits<std::uint64_t>::max()) {
        std::uint64_t value = 0;
        for (unsigned shift = 0;; shift += 7) {
            const std::uint64_t next = byte();
            const auto digit = next & 0x7FU;
            if (shift == 63 && digit > 1) {
                fail("has a number above 2^64");
            }
            value |= digit << shift;
            if (next < 0x80U) {
                if (digit == 0 && shift > 0) {
                    fail("has a number in more bytes than it needs");
                }
                break;
            }
            if (shift == 63) {
                fail("has a number above 2^64");
            }
        }
        if (value > most) {
            fail("has the number " + std::to_string(value) + " where " + std::to_string(most) +
                 " is the most");
        }
        return value;
    }
    [[nodiscard]] std::int64_t element() {
        return static_cast<std::int64_t>(
            number(static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())));
    }
    [[nodiscard]] int rank() {
        return static_cast<int>(
            number(static_cast<std::uint64_t>(std::numeric_limits<int>::max() - 1)));
    }
    /// A number from `least` to `end - 1`.
    [[nodiscard]] std::size_t ascending(std::size_t least, std::size_t end) {
        if (least >= end) {
            fail("names something beyond the last of " + std::to_string(end));
        }
        return least + static_cast<std::size_t>(number(end - 1 - least));
    }
    /// The length of a list whose entries take at least `entry_bytes` each.
    [[nodiscard]] std::size_t count(std::size_t entry_bytes) {
        const auto value = number();
        if (value > (bytes_.size() - at_) / entry_bytes) {
            fail("has a list of " + std::to_string(value) + " entries, longer than its bytes");
        }
        return static_cast<std::size_t>(value);
    }
    [[nodiscard]] std::uint64_t hash() {
        std::uint64_t value = 0;
        for (unsigned shift = 0; shift < 64; shift += 8) {
            value |= std::uint64_t{byte()} << shift;
        }
        return value;
    }
    /// A text of at most `most` bytes.
    [[nodiscard]] std::string text(std::size_t most) {
        const auto length = count(1);
        const auto found = bytes_.substr(at_, length);
        if (length > most) {
            fail("has a text of " + std::to_string(length) + " bytes where " +
                 std::to_string(most) + " are the most");
        }
        if (std::ranges::any_of(found, [](char c) { return static_cast<unsigned char>(c) < 32; })) {
            fail("has a text with control characters");
        }
        at_ += length;
        return std::string{found};
    }
    /// Another message, which is the rest of this one.
    [[nodiscard]] std::string_view rest() {
        return bytes_.substr(std::exchange(at_, bytes_.size()));
    }
    void finish() const {
        if (at_ != bytes_.size()) {
            fail("goes on after its end");
        }
    }

private:
    [[nodiscard]] unsigned char byte() {
        if (at_ == bytes_.size()) {
            fail("ends too early");
        }
        return static_cast<unsigned char>(bytes_[at_++]);
    }

    std::string_view bytes_;
    std::string_view what_;
    std::size_t at_ = 0;
};

inline void write_reads(plan_writer& out, const std::vector<plan::pull_read>& reads) {
    out.number(reads.size());
    std::size_t source = 0;
    for (const auto& read : reads) {
        out.ascending(read.source, source).number(read.offset).number(read.dimensions.size());
        source = read.source;
        for (const auto& [extent, stride] : read.dimensions) {
            out.number(extent).number(stride);
        }
    }
}

inline void write_chunks(plan_writer& out, const std::vector<plan::pull_chunk>& chunks) {
    out.number(chunks.size());
    std::size_t group = 0;
    for (const auto& chunk : chunks) {
        out.ascending(chunk.group, group).number(chunk.count).number(chunk.bytes);
        group = chunk.group;
    }
}

[[nodiscard]] inline std::vector<plan::pull_read> read_reads(plan_reader& in,
                                                             std::size_t parameters) {
    std::vector<plan::pull_read> reads(in.count(3));
    std::size_t source = 0;
    for (auto& read : reads) {
        source = read.source = in.ascending(source, parameters);
        read.offset = in.element();
        const auto dimensions = in.count(2);
        if (dimensions > plan::most_read_dimensions) {
            in.fail("has a read of " + std::to_string(dimensions) + " dimensions");
        }
        read.dimensions.resize(dimensions);
        for (auto& dimension : read.dimensions) {
            dimension.extent = in.element();
            dimension.stride = in.element();
        }
    }
    return reads;
}

[[nodiscard]] inline std::vector<plan::pull_chunk> read_chunks(plan_reader& in,
                                                               std::size_t parameters,
                                                               std::size_t reads) {
    std::vector<plan::pull_chunk> chunks(in.count(3));
    std::size_t group = 0;
    std::size_t first = 0;
    for (auto& chunk : chunks) {
        group = chunk.group = in.ascending(group, parameters);
        chunk.first = first;
        chunk.count = static_cast<std::size_t>(in.number(reads - first));
        chunk.bytes = in.number();
        first += chunk.count;
    }
    return chunks;
}

}  // namespace detail

/// @throws usage_error positions are not ascending.
[[nodiscard]] inline std::string encode(const plan::needs_report& report) {
    detail::plan_writer out{'N'};
    out.number(report.needs.size());
    std::size_t next = 0;
    for (const auto& need : report.needs) {
        out.ascending(need.position, next).number(need.bytes).hash(need.signature);
        next = need.position + 1;
    }
    return std::move(out).take();
}

/// @param parameters number of parameters of the list.
/// @throws protocol_error it is no such message, or names a position beyond the list.
[[nodiscard]] inline plan::needs_report decode_needs_report(std::string_view bytes,
                                                            std::size_t parameters) {
    detail::plan_reader in{bytes, 'N', "a report of what a worker needs"};
    plan::needs_report report;
    report.needs.resize(in.count(10));
    std::size_t next = 0;
    for (auto& need : report.needs) {
        need.position = in.ascending(next, parameters);
        next = need.position + 1;
        need.bytes = in.number();
        need.signature = in.hash();
    }
    in.finish();
    return report;
}

/// @throws usage_error it is not as `plan::route` makes it.
[[nodiscard]] inline std::string encode(const plan::worker_route& route) {
    detail::plan_writer out{'R'};
    out.number(route.worker).number(route.least_split_bytes).number(route.classes.size());
    std::size_t next = 0;
    for (const auto& one : route.classes) {
        out.ascending(one.holder_class, next).number(one.shares.size());
        next = one.holder_class + 1;
        for (const auto& share : one.shares) {
            out.number(share.owner).number(share.bytes);
        }
    }
    out.number(route.shared.size());
    std::size_t position = 0;
    for (const auto& piece : route.shared) {
        out.ascending(piece.position, position).number(piece.begin);
        out.ascending(piece.end, piece.begin).number(piece.ingester).number(piece.owner);
        position = piece.position;
    }
    return std::move(out).take();
}

/// @param owners whose classes the route is about.
/// @throws protocol_error it is no such message, or names a class, position or trainer rank that
/// does not exist.
[[nodiscard]] inline plan::worker_route decode_worker_route(std::string_view bytes,
                                                            const plan::ownership& owners) {
    detail::plan_reader in{bytes, 'R', "a worker's route"};
    const auto owner = [&] {
        const auto rank = in.rank();
        if (rank >= owners.ranks()) {
            in.fail("names trainer rank " + std::to_string(rank) + " of " +
                    std::to_string(owners.ranks()));
        }
        return rank;
    };
    plan::worker_route route{.worker = in.rank(), .least_split_bytes = in.number()};
    route.classes.resize(in.count(2));
    std::size_t next = 0;
    for (auto& one : route.classes) {
        one.holder_class = in.ascending(next, owners.classes().size());
        next = one.holder_class + 1;
        one.shares.resize(in.count(2));
        for (auto& share : one.shares) {
            share.owner = owner();
            share.bytes = in.number();
        }
    }
    route.shared.resize(in.count(5));
    std::size_t position = 0;
    for (auto& piece : route.shared) {
        position = piece.position = in.ascending(position, owners.parameters());
        piece.begin = in.number();
        piece.end =
            piece.begin + in.number(std::numeric_limits<std::uint64_t>::max() - piece.begin);
        piece.ingester = in.rank();
        piece.owner = owner();
    }
    in.finish();
    return route;
}

/// @throws usage_error it is not as `plan::worker_plan::part_for` makes it.
[[nodiscard]] inline std::string encode(const plan::owner_part& part) {
    detail::plan_writer out{'P'};
    out.number(part.worker).number(part.owner).hash(part.manifest_hash);
    out.number(part.sections.size());
    for (const auto& section : part.sections) {
        out.number(section.ingester + 1);
        detail::write_reads(out, section.reads);
        detail::write_chunks(out, section.chunks);
    }
    return std::move(out).take();
}

/// @param parameters number of parameters of the list.
/// @throws protocol_error it is no such message, or names a position beyond the list.
[[nodiscard]] inline plan::owner_part decode_owner_part(std::string_view bytes,
                                                        std::size_t parameters) {
    detail::plan_reader in{bytes, 'P', "a worker's plan"};
    plan::owner_part part{.worker = in.rank(), .owner = in.rank(), .manifest_hash = in.hash()};
    part.sections.resize(in.count(3));
    for (auto& section : part.sections) {
        section.ingester = in.rank() - 1;
        section.reads = detail::read_reads(in, parameters);
        section.chunks = detail::read_chunks(in, parameters, section.reads.size());
    }
    in.finish();
    return part;
}

}  // namespace weightwire::wire
