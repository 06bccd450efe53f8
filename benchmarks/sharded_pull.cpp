// SPDX-License-Identifier: Apache-2.0
//
// Sharded pull between processes of one machine without a GPU: a mixture-of-experts list of
// Qwen3-30B-A3B's widths with fewer layers, experts and words, held once by four trainer ranks (PP2
// x EP2), to four worker ranks (experts EP4, attention TP4), in_place, over HTTP. Compared with
// reads of as many bytes in one piece, by all workers at once, over the same fabric; and with what
// the simulator makes of their rates. Every element of every worker is looked at after each pull.
//
//   sharded_pull [--fabric shared_memory|ucx] [--layers N] [--experts N] [--rounds N] [--chunk MiB]
//                [--ranks 4|2|1] [--staged] [--kill]

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <weightwire/core/digest.hpp>
#include <weightwire/fabrics/shared_memory_arena.hpp>
#include <weightwire/fabrics/shared_memory_fabric.hpp>
#include <weightwire/sinks/parameter_table.hpp>

#ifdef WEIGHTWIRE_BENCHMARK_UCX
#include <weightwire/fabrics/ucx/fabric.hpp>
#endif

#include "support/pull_options.hpp"
#include "support/pull_rounds.hpp"

namespace {

using namespace weightwire;

std::uint64_t mixed(std::uint64_t v) {
    v ^= v >> 33U;
    v *= 0xff51afd7ed558ccdULL;
    v ^= v >> 33U;
    v *= 0xc4ceb9fe1a85ec53ULL;
    return v ^ (v >> 33U);
}
std::uint64_t key_of(std::string_view name, std::uint64_t round) {
    return mixed(digest(std::as_bytes(std::span{name})) + round * 0x9E3779B97F4A7C15ULL);
}

/// Shared memory, so that every fabric may read it.
class host_weights {
public:
    host_weights(const manifest& parameters, int /*device*/)
        : parameters_{parameters}, arena_{shm::arena::bytes_for(parameters)} {
        for (const auto& each : parameters.parameters()) {
            views_.push_back(arena_.allocate(each.dtype, each.shape));
        }
    }
    [[nodiscard]] const std::vector<mutable_tensor_view>& views() const noexcept { return views_; }
    /// From the first tensor's first byte to the last one's last.
    [[nodiscard]] std::span<std::byte> all() const {
        auto* const begin = views_.front().data();
        return {begin, views_.back().data() + views_.back().byte_size()};
    }
    void fill(std::uint64_t round) {
        for (std::size_t i = 0; i < views_.size(); ++i) {
            const auto key = key_of(parameters_[i].name, round);
            auto* const to = views_[i].data();
            for (std::size_t at = 0; at < views_[i].byte_size(); at += 8) {
                const auto word = mixed(key + at / 8);
                std::memcpy(to + at, &word, std::min<std::size_t>(8, views_[i].byte_size() - at));
            }
        }
    }
    void overwrite() { std::memset(all().data(), 0xEE, all().size()); }

private:
    manifest parameters_;
    shm::arena arena_;
    std::vector<mutable_tensor_view> views_;
};

/// Elements one by one, by the regions alone.
class host_check {
public:
    host_check(int /*device*/, const manifest& checkpoint, std::span<const plan::region> regions,
               std::span<const mutable_tensor_view> to)
        : checkpoint_{checkpoint}, regions_{regions.begin(), regions.end()}, to_{to} {}
    [[nodiscard]] std::uint64_t wrong(std::uint64_t round) const {
        std::uint64_t found = 0;
        for (const auto& each : regions_) {
            const auto& source = checkpoint_[each.source];
            const auto key = key_of(source.name, round);
            const auto item = item_bits(source.dtype) / 8;
            plan::for_each_run(
                each, item, [&](std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {
                    for (std::uint64_t b = 0; b < bytes; b += item) {
                        const auto word = mixed(key + (from + b) / 8) >> (8 * ((from + b) % 8));
                        found +=
                            std::memcmp(&word, to_[each.destination].data() + to + b, item) == 0
                                ? 0U
                                : 1U;
                    }
                });
        }
        return found;
    }

private:
    const manifest& checkpoint_;
    std::vector<plan::region> regions_;
    std::span<const mutable_tensor_view> to_;
};

template <class Fabric>
struct host_kit {
    using fabric = Fabric;
    using weights = host_weights;
    using check = host_check;
    struct shown {
        std::array<char, 4096> address{};
        std::array<char, 4096> handle{};
        std::uint64_t offset = 0;
        std::uint64_t bytes = 0;
        std::uint64_t size = 0;
    };

    static constexpr std::array<std::string_view, 1> uniform_names{"reads in one piece"};
    static constexpr std::size_t best = 0;
    /// A packer and a reader; an owner's fabric may have a thread that serves.
    static constexpr int threads_a_rank = HasFabricService<typename Fabric::owner> ? 3 : 2;
    static constexpr std::uint64_t not_counted = ~std::uint64_t{0};

    static void settle(int /*device*/) {}
    [[nodiscard]] static shown show(const weights& memory, int device) {
        static typename Fabric::owner owner{device};  // as long as the process
        const auto all = memory.all();
        const auto made = owner.export_memory(all.data(), all.size());
        if (const auto* const refused = std::get_if<fabric_refusal>(&made)) {
            throw std::runtime_error{refused->reason};
        }
        const auto& exported = std::get<fabric_export>(made);
        shown told{.offset = exported.offset, .bytes = exported.bytes, .size = all.size()};
        owner.address().copy(told.address.data(), told.address.size() - 1);
        exported.handle.copy(told.handle.data(), told.handle.size() - 1);
        return told;
    }
    [[nodiscard]] static auto table(const manifest& mine, const weights& landing, int /*device*/) {
        std::vector<user_parameter> held;
        for (std::size_t i = 0; i < mine.size(); ++i) {
            held.push_back({mine[i].name, landing.views()[i]});
        }
        return std::unique_ptr<parameter_table>{new parameter_table(
            parameter_table::over(std::move(held), {.mode = commit_mode::in_place}))};
    }
    [[nodiscard]] static double copies_seconds(const weights& landing) {
        const auto all = landing.all();
        std::vector<std::byte> other(all.size());
        const auto once = [&] {
            const auto begin = benchmarks::monotonic::now();
            std::memcpy(other.data(), all.data(), all.size());
            return benchmarks::seconds_since(begin);
        };
        static_cast<void>(once());  // touches the memory
        return once();
    }
    [[nodiscard]] static std::uint64_t allocations() { return not_counted; }

    class uniform {
    public:
        uniform(const shown& from, const weights& to, int device)
            : reader_{device},
              connection_{reader_.connect(from.address.data(), soon(), {})},
              memory_{reader_.open(connection_, from.handle.data(), from.bytes, soon(), {})},
              bytes_{std::min<std::uint64_t>(from.size, to.all().size()) / 16 * 16} {
            const std::array runs{remote_run<typename Fabric::memory>{
                .from = &memory_, .offset = from.offset, .to = to.all().data(), .bytes = bytes_}};
            read_ = reader_.prepare(runs);
        }
        [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
        void run(std::size_t /*which*/) {
            reader_.start(read_, 0);
            reader_.wait(read_, soon(), {});
        }

    private:
        [[nodiscard]] static deadline soon() { return deadline::after(std::chrono::seconds{20}); }

        typename Fabric::reader reader_;
        typename Fabric::connection connection_;
        typename Fabric::memory memory_;
        std::uint64_t bytes_;
        typename Fabric::read read_;
    };
};

}  // namespace

int main(int argc, char** argv) try {
    benchmarks::pull_options options;
    auto& model = options.wanted.model;
    model.layers = 2;
    model.experts = 16;
    model.vocabulary = 8192;
    std::string fabric = "shared_memory";
    if (!benchmarks::read_pull_options("sharded_pull", argc, argv, options,
                                       {{"--experts", &model.experts}, {"--fabric", &fabric}})) {
        return 2;
    }
    if (fabric == "shared_memory") {
        return benchmarks::run_pull<host_kit<shm::fabric>>(options);
    }
#ifdef WEIGHTWIRE_BENCHMARK_UCX
    if (fabric == "ucx") {
        return benchmarks::run_pull<host_kit<ucx::fabric>>(options);
    }
#endif
    fmt::print(stderr, "sharded_pull: this build knows no fabric {}\n", fabric);
    return 2;
} catch (const std::exception& failed) {
    fmt::print(stderr, "sharded_pull: {}\n", failed.what());
    return 1;
}
