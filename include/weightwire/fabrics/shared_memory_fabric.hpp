#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <weightwire/core/check_time.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/address_map.hpp>
#include <weightwire/fabrics/node_address.hpp>
#include <weightwire/fabrics/process.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/fabrics/shared_memory.hpp>
#include <weightwire/fabrics/shared_memory_copy.hpp>

/// @file
/// A pull fabric over host memory that processes of one machine share: a reader maps the owner's
/// sealed memory files and copies from them by itself.

namespace weightwire::shm {

namespace detail {

/// Process, descriptor, start time, offset and length.
[[nodiscard]] inline std::string text_of(const handle& value) {
    return joined<5>({static_cast<std::uint64_t>(value.pid), static_cast<std::uint64_t>(value.fd),
                      value.start_time, value.offset, value.length});
}

}  // namespace detail

/// Models `PullFabric`.
struct fabric {
    static constexpr std::string_view name = "shared_memory";
    static constexpr fabric_capabilities capabilities{.host_memory = true, .in_place = true};

    class reader;

    /// One segment, exported as a whole.
    class arena {
    public:
        arena() noexcept = default;
        explicit arena(std::uint64_t bytes) : segment_{segment::create(bytes)} {}
        [[nodiscard]] std::byte* data() const noexcept { return segment_.data(); }
        [[nodiscard]] std::uint64_t size() const noexcept { return segment_.size(); }
        [[nodiscard]] fabric_export exported() const {
            return {.handle = detail::text_of(segment_.exported()), .bytes = segment_.size()};
        }

    private:
        segment segment_;
    };

    /// Names sealed memory files of this process: `shm::arena`s, and any that the user has made.
    class owner {
    public:
        explicit owner(int /*device*/ = 0) : self_{this_process()} {}
        [[nodiscard]] std::string address() const { return node_address(self_); }
        /// Looks at this process's mappings once, when it is first called.
        [[nodiscard]] std::variant<fabric_export, fabric_refusal> export_memory(
            const std::byte* address, std::uint64_t bytes) {
            if (!map_) {
                map_ = address_map::of_this_process();
            }
            const auto found = map_->find(address, bytes);
            const auto* const file = found ? file_of(found->file) : nullptr;
            if (file == nullptr) {
                return fabric_refusal{"it does not lie in sealed shared memory"};
            }
            return fabric_export{
                .handle = file->text, .offset = found->offset, .bytes = file->bytes};
        }
        [[nodiscard]] arena allocate(std::uint64_t bytes) { return arena{bytes}; }

    private:
        struct known_file {
            file_identity file{};
            std::string text{};  ///< empty: it cannot be exported
            std::uint64_t bytes = 0;
        };
        [[nodiscard]] const known_file* file_of(const file_identity& wanted) {
            auto found = std::ranges::find(files_, wanted, &known_file::file);
            if (found == files_.end()) {
                const auto made = exported_file(wanted, self_);
                files_.push_back({wanted, made ? detail::text_of(*made) : std::string{},
                                  made ? made->length : 0});
                found = files_.end() - 1;
            }
            return found->text.empty() ? nullptr : &*found;
        }

        process_identity self_;
        std::optional<address_map> map_;
        std::vector<known_file> files_;
    };

    using connection = node_connection;

    /// One memory file of it, mapped. Stays readable when its owner has died.
    class memory {
    public:
        [[nodiscard]] std::uint64_t size() const noexcept { return mapping_.size(); }
        [[nodiscard]] const std::byte* data() const noexcept { return mapping_.data(); }

    private:
        friend class reader;
        explicit memory(mapping&& from) noexcept : mapping_{std::move(from)} {}
        mapping mapping_;
    };

    using run = remote_run<memory>;

    /// Runs, and how far they have been copied.
    class read {
    public:
        read() = default;

    private:
        friend class reader;
        std::vector<run> runs_;
        std::uint64_t shift_ = 0;
        std::size_t next_ = 0;     ///< run under way
        std::uint64_t lines_ = 0;  ///< of it, done
        std::uint64_t bytes_ = 0;  ///< of its next line, done
        bool under_way_ = false;
    };

    /// Copies on the calling thread, with streaming stores: a piece in each `done`, all in `wait`.
    class reader {
    public:
        explicit reader(int /*device*/ = 0) {}

        [[nodiscard]] connection connect(std::string_view address, deadline until,
                                         const std::stop_token& stop) const {
            weightwire::detail::check_time(until, stop, [] { return at_init(); });
            return connection::to(address, "shared memory");
        }

        [[nodiscard]] memory open(connection& from, std::string_view handle_text,
                                  std::uint64_t bytes, deadline until,
                                  const std::stop_token& stop) const {
            weightwire::detail::check_time(until, stop, [] { return at_init(); });
            const auto numbers = detail::split<5>(handle_text);
            constexpr auto most =
                static_cast<std::uint64_t>(std::numeric_limits<std::int32_t>::max());
            if (!numbers || (*numbers)[0] > most || (*numbers)[1] > most) {
                throw protocol_error{"a handle of shared memory is garbled", at_init()};
            }
            const handle named{.pid = static_cast<std::int64_t>((*numbers)[0]),
                               .fd = static_cast<std::int64_t>((*numbers)[1]),
                               .start_time = (*numbers)[2],
                               .offset = (*numbers)[3],
                               .length = (*numbers)[4]};
            if (named.owner() != from.who() || named.length < bytes) {
                throw protocol_error{
                    "a handle names memory of another process than its trainer rank's, or fewer "
                    "bytes than it is said to have",
                    at_init()};
            }
            // A trainer in this process may let go while a thread of ours still reads, as one in
            // another process may: a mapping of our own keeps the memory.
            return memory{mapping::open(named, {.what = "a trainer rank's memory",
                                                .context = at_init(),
                                                .resolve_locally = false})};
        }

        [[nodiscard]] read prepare(std::span<const run> runs) const {
            read made;
            made.runs_.assign(runs.begin(), runs.end());
            return made;
        }
        void start(read& which, std::uint64_t shift) const noexcept {
            which.shift_ = shift;
            which.next_ = 0;
            which.lines_ = 0;
            which.bytes_ = 0;
            which.under_way_ = true;
        }
        [[nodiscard]] bool done(read& which) const noexcept {
            std::uint64_t budget = piece_bytes;
            while (which.under_way_ && budget > 0) {
                copy_some(which, budget);
            }
            detail::stream_fence();
            return !which.under_way_;
        }
        void wait(read& which, deadline until, const std::stop_token& stop) const {
            while (!done(which)) {
                weightwire::detail::check_time(
                    until, stop, [] { return error_context{.phase = phase::update}; });
            }
        }
        void cancel(read& which) const noexcept { which.under_way_ = false; }

    private:
        /// Bytes between two looks at the clock.
        static constexpr std::uint64_t piece_bytes = std::uint64_t{1} << 20U;

        [[nodiscard]] static error_context at_init() { return {.phase = phase::init}; }

        /// The next lines of a run, or a part of one line, and the budget less what they have.
        static void copy_some(read& which, std::uint64_t& budget) noexcept {
            if (which.next_ == which.runs_.size()) {
                which.under_way_ = false;
                return;
            }
            const auto& run = which.runs_[which.next_];
            const auto* const from = run.from->data() + which.shift_ + run.offset +
                                     which.lines_ * run.from_step + which.bytes_;
            auto* const to = run.to + which.lines_ * run.to_step + which.bytes_;
            if (run.bytes > budget || which.bytes_ != 0) {
                const auto count = std::min(budget, run.bytes - which.bytes_);
                detail::copy_run(to, from, static_cast<std::size_t>(count), stores::streaming);
                which.bytes_ += count;
                budget -= count;
                if (which.bytes_ == run.bytes) {
                    which.bytes_ = 0;
                    ++which.lines_;
                }
            } else {
                const auto fit = run.bytes == 0 ? run.count : budget / run.bytes;
                const auto count = std::min(fit, run.count - which.lines_);
                detail::copy_line(to, static_cast<std::int64_t>(run.to_step), from,
                                  static_cast<std::int64_t>(run.from_step),
                                  static_cast<std::size_t>(run.bytes), count, stores::streaming);
                which.lines_ += count;
                budget -= count * run.bytes;
            }
            if (which.lines_ == run.count) {
                which.lines_ = 0;
                ++which.next_;
            }
        }
    };
};

static_assert(explain_pull_fabric<fabric>());

}  // namespace weightwire::shm
