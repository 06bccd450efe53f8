// SPDX-License-Identifier: Apache-2.0
//
// Sends a safetensors checkpoint to live workers, round after round, over host shared memory.

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/backends/ipc/backend.hpp>
#include <weightwire/engine/fan_out_sync_client.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/sources/safetensors.hpp>
#include <weightwire/trainer.hpp>

#include "support/round_key.hpp"

namespace {

struct arguments {
    std::string checkpoint;
    std::vector<std::string> servers;
    std::string token;
    std::uint64_t rounds = 1;
    std::uint64_t vary_seed = 0;
    std::uint64_t first_version = 0;
    std::size_t buffer_bytes = std::size_t{64} << 20U;
    std::size_t buffers = 2;
    double budget_seconds = 120;
    bool packed = false;
    bool vary = false;
    bool corrupt = false;
    bool step = false;
};

/// A bar on a terminal, nothing elsewhere.
class progress_bar {
public:
    explicit progress_bar(std::uint64_t total)
        : total_{total}, shown_{::isatty(STDERR_FILENO) != 0} {}

    void begin(std::uint64_t round) {
        round_ = round;
        done_ = 0;
        last_percent_ = 101;
    }
    void add(std::uint64_t bytes) {
        done_ += bytes;
        const auto percent = total_ == 0 ? 100 : done_ * 100 / total_;
        if (shown_ && percent != last_percent_) {
            last_percent_ = percent;
            fmt::print(stderr, "\rround {} [{:<40}] {:3}%", round_,
                       std::string(percent * 40 / 100, '#'), percent);
        }
    }
    void clear() const {
        if (shown_) {
            fmt::print(stderr, "\r{:<70}\r", "");
        }
    }

private:
    std::uint64_t total_;
    std::uint64_t done_ = 0;
    std::uint64_t round_ = 0;
    std::uint64_t last_percent_ = 101;
    bool shown_;
};

/// The checkpoint, telling the bar as its tensors are taken: a source made from a source by hand.
struct watched_checkpoint {
    static constexpr auto lifetime = weightwire::tensor_lifetime::until_next;
    const weightwire::safetensors_source& checkpoint;
    progress_bar& bar;

    auto metadata() const { return checkpoint.metadata(); }
    auto weights() const {
        return checkpoint.weights() |
               std::views::transform([this](const weightwire::named_tensor& entry) {
                   bar.add(entry.tensor.byte_size());
                   return entry;
               });
    }
    /// Without this the bytes would be copied from the mapping, and a checkpoint that somebody cuts
    /// short would end this program by a signal instead of an error.
    void read(const weightwire::named_tensor& tensor, std::uint64_t offset,
              std::span<std::byte> to) const {
        checkpoint.read(tensor, offset, to);
    }
};
static_assert(weightwire::explain_weight_source<watched_checkpoint>());

/// What happens to each piece while it is written to shared memory: the round's key, and on request
/// one flipped byte.
struct change {
    std::array<std::byte, 8> key{};
    bool corrupted = false;

    static void vary(void* self, std::string_view /*tensor*/, std::uint64_t offset,
                     std::span<std::byte> bytes) {
        examples::apply_round_key(bytes, offset, static_cast<change*>(self)->key);
    }
    /// One byte of one tensor a round: the first that comes.
    static void corrupt(void* self, std::string_view /*tensor*/, std::uint64_t /*offset*/,
                        std::span<std::byte> bytes) {
        auto& changes = *static_cast<change*>(self);
        if (!changes.corrupted && !bytes.empty()) {
            bytes.front() ^= std::byte{1};
            changes.corrupted = true;
        }
    }
};

/// Refuses what the options' types let through: a budget that is no number of milliseconds, and a
/// version that the protocol's signed number cannot carry.
void require_in_range(const arguments& options) {
    constexpr auto last_version =
        static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    // Written so that NaN is refused too.
    if (!(options.budget_seconds >= 0.001 && options.budget_seconds <= 1e6)) {
        throw CLI::ValidationError{"--budget", "must be 0.001 to 1000000 seconds"};
    }
    if (options.first_version > last_version ||
        options.rounds - 1 > last_version - options.first_version) {
        throw CLI::ValidationError{"--version-from",
                                   "the last round's version must be at most 2^63 - 1"};
    }
}

arguments parse(int argc, char** argv) {
    arguments options;
    CLI::App app{"Sends a safetensors checkpoint to live weightwire workers."};
    app.add_option("checkpoint", options.checkpoint,
                   "a .safetensors file, an index, or a folder with either")
        ->required();
    app.add_option("--server", options.servers, "URL of a worker server; repeat for more")
        ->required();
    app.add_option("--rounds", options.rounds, "how many times to send")
        ->check(CLI::PositiveNumber);
    app.add_flag("--packed", options.packed,
                 "concatenate tensors into buffers instead of sending each by itself");
    app.add_option("--buffer-bytes", options.buffer_bytes, "size of one buffer with --packed");
    app.add_option("--buffers", options.buffers, "number of buffers with --packed");
    app.add_option("--token", options.token, "bearer token of the servers");
    const auto* const vary =
        app.add_option("--vary", options.vary_seed,
                       "XOR a key made of this seed and the version into every tensor");
    app.add_option("--version-from", options.first_version,
                   "version of the first round (default: one above the servers')");
    app.add_option("--budget", options.budget_seconds,
                   "seconds that init, and each round, may take; at most 1000000");
    app.add_flag("--corrupt", options.corrupt,
                 "flip one byte of the first tensor in flight: the workers must notice");
    app.add_flag("--step", options.step,
                 "after each round, say so and wait for a line on standard input");
    try {
        app.parse(argc, argv);
        require_in_range(options);
    } catch (const CLI::ParseError& refused) {
        std::exit(app.exit(refused));
    }
    options.vary = vary->count() != 0;
    return options;
}

/// `text` without what a terminal would act on: peers choose parts of it. Each control character
/// becomes `?`, so that an escape sequence is seen and not obeyed.
std::string printable(std::string_view text) {
    std::string result{text};
    unsigned char before = 0;
    for (auto& character : result) {
        const auto code = static_cast<unsigned char>(character);
        // U+0080 to U+009F are control characters as well: 0xC2 and one of these, or one alone.
        const bool upper = code >= 0x80 && code < 0xA0 && (before == 0xC2 || before < 0x80);
        if (code < 0x20 || code == 0x7F || upper) {
            character = '?';
        }
        before = code;
    }
    return result;
}

void print_table(const std::vector<weightwire::sync_report>& reports) {
    fmt::print("{:>7} {:<28} {:>5} {:<9} {:>12} {:>9} {:>9} {:>9}\n", "version", "peer", "ranks",
               "status", "bytes", "data s", "total s", "GB/s");
    for (const auto& report : reports) {
        for (const auto& peer : report.peers) {
            const auto rate = peer.data_seconds > 0
                                  ? static_cast<double>(peer.bytes) / peer.data_seconds * 1e-9
                                  : 0.0;
            fmt::print("{:>7} {:<28} {:>5} {:<9} {:>12} {:>9.4f} {:>9.4f} {:>9.2f}\n",
                       report.version, printable(peer.peer), peer.world_size,
                       weightwire::to_string(peer.status), peer.bytes, peer.data_seconds,
                       report.total_seconds, rate);
            if (peer.status == weightwire::peer_status::unknown) {
                fmt::print(
                    "{:>7} {}/weight_info tells which version it serves: it did not answer\n", "",
                    printable(peer.peer));
            }
        }
    }
}

/// For a script that looks at the workers between rounds.
void wait_for_line(std::uint64_t version) {
    fmt::print("committed version {}\n", version);
    std::fflush(stdout);
    int read = 0;
    do {
        read = std::getchar();
    } while (read != '\n' && read != EOF);
}

void run(const arguments& options) {
    using namespace weightwire;
    const safetensors_source checkpoint{options.checkpoint};
    change changes;
    std::uint64_t bytes = 0;
    for (const auto& parameter : checkpoint.metadata()) {
        bytes += parameter.byte_size();
    }
    progress_bar bar{bytes};
    const auto budget =
        std::chrono::milliseconds{static_cast<std::int64_t>(options.budget_seconds * 1000)};
    auto engine = trainer_init(
        ipc::trainer_init_info{.packed = options.packed,
                               .packed_buffer_size_bytes = options.buffer_bytes,
                               .packed_num_buffers = options.buffers,
                               .verify = true,
                               .transform = {options.vary ? &change::vary : nullptr, &changes},
                               .tamper = {options.corrupt ? &change::corrupt : nullptr, &changes}},
        fan_out_sync_client{http_sync_clients(options.servers, {.token = options.token})},
        watched_checkpoint{checkpoint, bar}, {.init_budget = budget, .send_budget = budget});
    std::vector<sync_report> reports;
    for (std::uint64_t round = 0; round < options.rounds; ++round) {
        const auto version =
            options.first_version != 0 ? options.first_version + round : engine.next_version();
        changes = {.key = examples::round_key(options.vary_seed, version)};
        bar.begin(round + 1);
        try {
            reports.push_back(engine.send_weights({.version = version}));
        } catch (...) {
            bar.clear();
            print_table({engine.last_report()});
            throw;
        }
        bar.clear();
        if (options.step) {
            wait_for_line(version);
        }
    }
    engine.close(deadline::after(std::chrono::seconds{5}));
    print_table(reports);
    fmt::print("{} tensors, {} bytes, {} rounds, {} servers\n", checkpoint.size(), bytes,
               options.rounds, options.servers.size());
}

}  // namespace

int main(int argc, char** argv) {
    try {
        run(parse(argc, argv));
    } catch (const std::exception& failed) {
        fmt::print(stderr, "push_checkpoint: {}\n", printable(failed.what()));
        return 1;
    }
    return 0;
}
