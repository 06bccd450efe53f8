// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/loaders.hpp>
#include <weightwire/plan/recorder.hpp>
#include <weightwire/plan/recording_tensor.hpp>
#include <weightwire/plan/regions.hpp>

namespace {

using namespace weightwire;
namespace loaders = plan::loaders;
using loaders::shard;
using loaders::uneven;
using plan::recorder;
using plan::recording;
using plan::region;

using bytes = std::vector<std::byte>;

std::int64_t pick(std::mt19937& random, std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>{least, most}(random);
}

/// Parameters with random bytes, and how often each byte was read or written.
class memory {
public:
    memory(std::vector<param_meta> list, std::mt19937& random) : parameters_{std::move(list)} {
        for (const auto& parameter : parameters_.parameters()) {
            auto& made = data_.emplace_back(parameter.byte_size());
            for (auto& byte : made) {
                byte = static_cast<std::byte>(random());
            }
            times_.emplace_back(made.size());
        }
    }
    [[nodiscard]] const manifest& parameters() const { return parameters_; }
    [[nodiscard]] bytes& data(std::size_t i) { return data_[i]; }
    [[nodiscard]] bytes& data(const std::string& name) { return data_[parameters_.find(name)]; }
    [[nodiscard]] std::vector<int>& times(std::size_t i) { return times_[i]; }
    [[nodiscard]] std::vector<int>& times(const std::string& name) {
        return times_[parameters_.find(name)];
    }
    /// Bytes of row `row` of a parameter whose outermost dimensions, as many as there are in
    /// `index`, are indexed.
    [[nodiscard]] bytes part(const std::string& name, const std::vector<std::int64_t>& index) {
        const auto& parameter = parameters_[parameters_.find(name)];
        std::uint64_t at = 0;
        std::uint64_t size = parameter.byte_size();
        for (std::size_t d = 0; d < index.size(); ++d) {
            size /= static_cast<std::uint64_t>(parameter.shape[d]);
            at += static_cast<std::uint64_t>(index[d]) * size;
        }
        const auto begin = data(name).begin() + static_cast<std::ptrdiff_t>(at);
        return {begin, begin + static_cast<std::ptrdiff_t>(size)};
    }

private:
    manifest parameters_;
    std::vector<bytes> data_;
    std::vector<std::vector<int>> times_;
};

/// Runs a loader, checks what it recorded as an owner would, and moves the bytes.
recording execute(memory& checkpoint, memory& worker, const std::function<void(recorder&)>& load) {
    auto made = plan::record(checkpoint.parameters(), worker.parameters(), load);
    for (const auto& value : made.regions) {
        const auto& destination = worker.parameters()[value.destination];
        plan::require_within(value, checkpoint.parameters()[value.source], destination);
        auto& from_bytes = checkpoint.data(value.source);
        auto& to_bytes = worker.data(value.destination);
        plan::for_each_run(value, item_bits(destination.dtype) / 8,
                           [&](std::uint64_t from, std::uint64_t to, std::uint64_t count) {
                               REQUIRE(from + count <= from_bytes.size());
                               REQUIRE(to + count <= to_bytes.size());
                               std::memcpy(to_bytes.data() + to, from_bytes.data() + from, count);
                               for (std::uint64_t i = 0; i < count; ++i) {
                                   ++checkpoint.times(value.source)[from + i];
                                   ++worker.times(value.destination)[to + i];
                               }
                           });
    }
    for (const auto& value : made.untouched) {
        plan::require_within(value, {}, worker.parameters()[value.destination]);
    }
    return made;
}

bool all_are(const std::vector<int>& times, int expected) {
    return std::ranges::all_of(times, [&](int count) { return count == expected; });
}

dtype random_dtype(std::mt19937& random) {
    return std::array{dtype::u8, dtype::bf16, dtype::f32, dtype::i64}[random() % 4];
}

template <class Error = usage_error>
void refused(const std::function<void()>& act, const std::string& tensor,
             const std::string& words) {
    try {
        act();
    } catch (const Error& refusal) {
        CHECK(refusal.context().tensor == tensor);
        CHECK_MESSAGE(std::string{refusal.what()}.find(words) != std::string::npos, refusal.what());
        return;
    }
    FAIL("no error: " << words);
}

TEST_CASE("loaders: shares follow one another and cover the extent") {
    for (std::int64_t extent = 0; extent < 40; ++extent) {
        for (std::int64_t count = 1; count < 12; ++count) {
            for (const auto rule : {uneven::last_is_smaller, uneven::first_is_larger}) {
                std::int64_t at = 0;
                std::int64_t least = extent;
                std::int64_t most = 0;
                for (std::int64_t rank = 0; rank < count; ++rank) {
                    const auto taken = loaders::share_of(extent, {rank, count}, rule);
                    REQUIRE(taken.begin == at);
                    REQUIRE(taken.length >= 0);
                    at += taken.length;
                    least = std::min(least, taken.length);
                    most = std::max(most, taken.length);
                }
                REQUIRE(at == extent);
                REQUIRE((rule == uneven::last_is_smaller || most - least <= 1));
                REQUIRE(most == (extent + count - 1) / count);
            }
        }
    }
}

TEST_CASE("loaders: the ranks' columns, or rows, are the whole layer") {
    std::mt19937 random{21};
    for (int i = 0; i < 200; ++i) {
        const auto count = pick(random, 1, 6);
        const bool even = random() % 2 == 0;
        const auto out = even ? count * pick(random, 1, 4) : pick(random, 1, 15);
        const auto in = even ? count * pick(random, 1, 4) : pick(random, 1, 15);
        const auto rule =
            even ? uneven::refuse
                 : std::array{uneven::last_is_smaller, uneven::first_is_larger}[random() % 2];
        const auto type = random_dtype(random);
        memory checkpoint{{{"a", type, {out, in}}, {"b", type, {out, in}}, {"n", type, {in}}},
                          random};
        bytes columns;
        std::vector<bytes> rows(static_cast<std::size_t>(out));
        for (std::int64_t rank = 0; rank < count; ++rank) {
            const shard part{rank, count};
            const auto mine_out = loaders::share_of(out, part, rule).length;
            const auto mine_in = loaders::share_of(in, part, rule).length;
            memory worker{
                {{"a", type, {mine_out, in}}, {"b", type, {out, mine_in}}, {"n", type, {in}}},
                random};
            (void)execute(checkpoint, worker, [&](recorder& r) {
                loaders::column_parallel(r.source("a"), r.destination("a"), part, rule);
                loaders::row_parallel(r.source("b"), r.destination("b"), part, rule);
                loaders::replicated(r.source("n"), r.destination("n"));
            });
            const auto& mine = worker.data("a");
            columns.insert(columns.end(), mine.begin(), mine.end());
            for (std::int64_t row = 0; row < out; ++row) {
                const auto piece = mine_in == 0 ? bytes{} : worker.part("b", {row});
                auto& whole = rows[static_cast<std::size_t>(row)];
                whole.insert(whole.end(), piece.begin(), piece.end());
            }
            REQUIRE(worker.data("n") == checkpoint.data("n"));
        }
        REQUIRE(columns == checkpoint.data("a"));
        for (std::int64_t row = 0; row < out; ++row) {
            REQUIRE(rows[static_cast<std::size_t>(row)] == checkpoint.part("b", {row}));
        }
        REQUIRE(all_are(checkpoint.times("a"), 1));
        REQUIRE(all_are(checkpoint.times("b"), 1));
        REQUIRE(all_are(checkpoint.times("n"), static_cast<int>(count)));
    }
}

TEST_CASE("loaders: fused attention has the rank's heads, any ratio of queries to keys") {
    std::mt19937 random{22};
    int repeated = 0;
    for (int i = 0; i < 200; ++i) {
        const auto count = std::array<std::int64_t, 6>{1, 2, 3, 4, 6, 8}[random() % 6];
        // As many heads of keys as ranks, a multiple, or a divisor.
        std::vector<std::int64_t> divisors;
        for (std::int64_t d = 1; d <= count; ++d) {
            if (count % d == 0) {
                divisors.push_back(d);
            }
        }
        const auto key_heads =
            random() % 2 == 0 ? count * pick(random, 1, 3) : divisors[random() % divisors.size()];
        const auto sharing = std::max<std::int64_t>(1, count / key_heads);
        repeated += sharing > 1 ? 1 : 0;
        const auto query_heads = std::max(key_heads, count) * pick(random, 1, 4);
        const auto rows = pick(random, 1, 4);
        const auto hidden = pick(random, 1, 5);
        const bool is_bias = random() % 4 == 0;
        const auto type = random_dtype(random);
        const auto extents = [&](std::int64_t heads) {
            return is_bias ? shape{heads * rows} : shape{heads * rows, hidden};
        };
        memory checkpoint{{{"q", type, extents(query_heads)},
                           {"k", type, extents(key_heads)},
                           {"v", type, extents(key_heads)}},
                          random};
        const auto mine_q = query_heads / count;
        const auto mine_k = std::max<std::int64_t>(1, key_heads / count);
        for (std::int64_t rank = 0; rank < count; ++rank) {
            memory worker{{{"qkv", type, extents(mine_q + 2 * mine_k)}}, random};
            (void)execute(checkpoint, worker, [&](recorder& r) {
                loaders::fused_qkv(r.source("q"), r.source("k"), r.source("v"),
                                   r.destination("qkv"), {query_heads, key_heads}, {rank, count});
            });
            bytes expected;
            const auto append = [&](const std::string& name, std::int64_t head) {
                for (std::int64_t row = 0; row < rows; ++row) {
                    const auto piece = checkpoint.part(name, {head * rows + row});
                    expected.insert(expected.end(), piece.begin(), piece.end());
                }
            };
            for (std::int64_t head = 0; head < mine_q; ++head) {
                append("q", rank * mine_q + head);
            }
            for (const auto* name : {"k", "v"}) {
                for (std::int64_t head = 0; head < mine_k; ++head) {
                    append(name, rank * key_heads / count + head);
                }
            }
            REQUIRE(worker.data("qkv") == expected);
            REQUIRE(all_are(worker.times("qkv"), 1));
        }
        REQUIRE(all_are(checkpoint.times("q"), 1));
        REQUIRE(all_are(checkpoint.times("k"), static_cast<int>(sharing)));
        REQUIRE(all_are(checkpoint.times("v"), static_cast<int>(sharing)));
    }
    CHECK(repeated > 20);
}

TEST_CASE("loaders: fused gate and up are the rank's gate, then its up") {
    std::mt19937 random{23};
    for (int i = 0; i < 100; ++i) {
        const auto count = pick(random, 1, 6);
        const bool even = random() % 2 == 0;
        const auto inner = even ? count * pick(random, 1, 4) : pick(random, 1, 15);
        const auto rule = even ? uneven::refuse : uneven::first_is_larger;
        const auto hidden = pick(random, 1, 5);
        const auto type = random_dtype(random);
        memory checkpoint{{{"gate", type, {inner, hidden}}, {"up", type, {inner, hidden}}}, random};
        bytes gates;
        bytes ups;
        for (std::int64_t rank = 0; rank < count; ++rank) {
            const auto mine = loaders::share_of(inner, {rank, count}, rule).length;
            memory worker{{{"gate_up", type, {2 * mine, hidden}}}, random};
            (void)execute(checkpoint, worker, [&](recorder& r) {
                loaders::fused_gate_up(r.source("gate"), r.source("up"), r.destination("gate_up"),
                                       {rank, count}, rule);
            });
            const auto& both = worker.data("gate_up");
            const auto half = both.begin() + static_cast<std::ptrdiff_t>(both.size() / 2);
            gates.insert(gates.end(), both.begin(), half);
            ups.insert(ups.end(), half, both.end());
        }
        REQUIRE(gates == checkpoint.data("gate"));
        REQUIRE(ups == checkpoint.data("up"));
    }
}

/// A layer of experts of random size, and where each byte of it belongs.
struct expert_case {
    std::int64_t expert_ranks, tensor_ranks, experts, inner, hidden;
    dtype type;
    uneven rule;

    explicit expert_case(std::mt19937& random)
        : expert_ranks{pick(random, 1, 4)},
          tensor_ranks{pick(random, 1, 3)},
          experts{random() % 2 == 0 ? expert_ranks * pick(random, 1, 3) : pick(random, 1, 9)},
          inner{tensor_ranks * pick(random, 1, 3)},
          hidden{pick(random, 1, 5)},
          type{random_dtype(random)},
          rule{experts % expert_ranks == 0 ? uneven::refuse : uneven::last_is_smaller} {}

    [[nodiscard]] std::vector<param_meta> stacked(std::int64_t expert_rank) const {
        const auto mine = loaders::share_of(experts, {expert_rank, expert_ranks}).length;
        return {{"w13", type, {mine, 2 * inner / tensor_ranks, hidden}},
                {"w2", type, {mine, hidden, inner / tensor_ranks}}};
    }
    /// Calls `act(expert rank, tensor rank)` for every worker.
    template <class Act>
    void each_worker(Act act) const {
        for (std::int64_t e = 0; e < expert_ranks; ++e) {
            for (std::int64_t t = 0; t < tensor_ranks; ++t) {
                act(shard{e, expert_ranks}, shard{t, tensor_ranks});
            }
        }
    }
    /// Checks a worker against elements that `gate`, `up` and `down` say by (expert, row, column).
    template <class Element>
    void check(memory& worker, const shard& e, const shard& t, Element gate, Element up,
               Element down) const {
        const auto mine = loaders::share_of(experts, e);
        const auto width = inner / t.count;
        for (std::int64_t local = 0; local < mine.length; ++local) {
            const auto expert = mine.begin + local;
            for (std::int64_t i = 0; i < width; ++i) {
                for (std::int64_t h = 0; h < hidden; ++h) {
                    const auto row = t.rank * width + i;
                    REQUIRE(worker.part("w13", {local, i, h}) == gate(expert, row, h));
                    REQUIRE(worker.part("w13", {local, width + i, h}) == up(expert, row, h));
                    REQUIRE(worker.part("w2", {local, h, i}) == down(expert, h, row));
                }
            }
        }
        REQUIRE(all_are(worker.times("w13"), 1));
        REQUIRE(all_are(worker.times("w2"), 1));
    }
};

using element = std::function<bytes(std::int64_t, std::int64_t, std::int64_t)>;

TEST_CASE("loaders: stacked experts are the rank's experts, cut by tensor rank") {
    std::mt19937 random{24};
    for (int i = 0; i < 60; ++i) {
        const expert_case layer{random};
        const auto name = [](std::int64_t expert, const char* what) {
            return "experts." + std::to_string(expert) + "." + what;
        };
        std::vector<param_meta> list;
        for (std::int64_t e = 0; e < layer.experts; ++e) {
            list.push_back({name(e, "gate"), layer.type, {layer.inner, layer.hidden}});
            list.push_back({name(e, "up"), layer.type, {layer.inner, layer.hidden}});
            list.push_back({name(e, "down"), layer.type, {layer.hidden, layer.inner}});
        }
        memory checkpoint{list, random};
        layer.each_worker([&](shard e, shard t) {
            memory worker{layer.stacked(e.rank), random};
            std::vector<std::int64_t> opened;
            (void)execute(checkpoint, worker, [&](recorder& r) {
                loaders::stacked_experts(
                    [&](std::int64_t expert) {
                        opened.push_back(expert);
                        return loaders::expert_sources{r.source(name(expert, "gate")),
                                                       r.source(name(expert, "up")),
                                                       r.source(name(expert, "down"))};
                    },
                    r.destination("w13"), r.destination("w2"), layer.experts, e, t, layer.rule);
            });
            REQUIRE(static_cast<std::int64_t>(opened.size()) ==
                    loaders::share_of(layer.experts, e).length);
            const auto of = [&](const char* what) -> element {
                return [&, what](std::int64_t expert, std::int64_t row, std::int64_t column) {
                    return checkpoint.part(name(expert, what), {row, column});
                };
            };
            layer.check(worker, e, t, of("gate"), of("up"), of("down"));
        });
        for (std::size_t k = 0; k < list.size(); ++k) {
            REQUIRE(all_are(checkpoint.times(k), 1));
        }
    }
}

TEST_CASE(
    "loaders: transposed experts in one tensor become the same, gate and up apart or in turn") {
    std::mt19937 random{25};
    for (int i = 0; i < 60; ++i) {
        const expert_case layer{random};
        const bool in_turn = random() % 2 == 0;
        const auto order =
            in_turn ? loaders::gate_up_order::interleaved : loaders::gate_up_order::gate_then_up;
        memory checkpoint{{{"gate_up", layer.type, {layer.experts, layer.hidden, 2 * layer.inner}},
                           {"down", layer.type, {layer.experts, layer.inner, layer.hidden}}},
                          random};
        layer.each_worker([&](shard e, shard t) {
            memory worker{layer.stacked(e.rank), random};
            (void)execute(checkpoint, worker, [&](recorder& r) {
                loaders::transposed_experts(r.source("gate_up"), r.source("down"),
                                            r.destination("w13"), r.destination("w2"), e, t, order,
                                            layer.rule);
            });
            const auto half = [&](std::int64_t which) -> element {
                return [&, which](std::int64_t expert, std::int64_t row, std::int64_t column) {
                    const auto at = in_turn ? 2 * row + which : which * layer.inner + row;
                    return checkpoint.part("gate_up", {expert, column, at});
                };
            };
            const element down = [&](std::int64_t expert, std::int64_t row, std::int64_t column) {
                return checkpoint.part("down", {expert, column, row});
            };
            layer.check(worker, e, t, half(0), half(1), down);
        });
        REQUIRE(all_are(checkpoint.times("gate_up"), 1));
        REQUIRE(all_are(checkpoint.times("down"), 1));
    }
}

TEST_CASE("loaders: an embedding is shared by rows, its padding stays untouched, a tied head too") {
    std::mt19937 random{26};
    int padded = 0;
    for (int i = 0; i < 200; ++i) {
        const auto count = pick(random, 1, 6);
        const auto vocabulary = pick(random, 1, 40);
        const auto multiple = pick(random, 1, 8) * count;
        const auto rows = (vocabulary + multiple - 1) / multiple * multiple / count;
        const auto more = pick(random, 0, 5);  // of padding at the trainer
        const auto hidden = pick(random, 1, 4);
        const auto type = random_dtype(random);
        memory checkpoint{{{"embed", type, {vocabulary + more, hidden}}}, random};
        for (std::int64_t rank = 0; rank < count; ++rank) {
            memory worker{{{"embed", type, {rows, hidden}}, {"head", type, {rows, hidden}}},
                          random};
            const auto before = worker.data("embed");
            const auto head_before = worker.data("head");
            const auto made = execute(checkpoint, worker, [&](recorder& r) {
                for (const auto* name : {"embed", "head"}) {
                    loaders::vocabulary_parallel(r.source("embed"), r.destination(name), vocabulary,
                                                 {rank, count});
                }
            });
            std::uint64_t untouched = 0;
            for (const auto& value : made.untouched) {
                untouched += value.elements();
            }
            std::uint64_t expected_untouched = 0;
            for (std::int64_t row = 0; row < rows; ++row) {
                const auto of = rank * rows + row;
                const bool is_padding = of >= vocabulary;
                padded += is_padding ? 1 : 0;
                expected_untouched += is_padding ? 2 * static_cast<std::uint64_t>(hidden) : 0;
                const auto size = static_cast<std::ptrdiff_t>(worker.part("embed", {0}).size());
                const auto old = before.begin() + row * size;
                const auto old_head = head_before.begin() + row * size;
                REQUIRE(worker.part("embed", {row}) ==
                        (is_padding ? bytes(old, old + size) : checkpoint.part("embed", {of})));
                REQUIRE(worker.part("head", {row}) == (is_padding
                                                           ? bytes(old_head, old_head + size)
                                                           : checkpoint.part("embed", {of})));
            }
            REQUIRE(untouched == expected_untouched);
        }
        const auto& times = checkpoint.times("embed");
        const auto real =
            times.begin() +
            static_cast<std::ptrdiff_t>(times.size() / static_cast<std::size_t>(vocabulary + more) *
                                        static_cast<std::size_t>(vocabulary));
        REQUIRE(std::all_of(times.begin(), real, [](int count_of) { return count_of == 2; }));
        REQUIRE(std::all_of(real, times.end(), [](int count_of) { return count_of == 0; }));
    }
    CHECK(padded > 200);
}

TEST_CASE("loaders: what ranks cannot share is an error that names it") {
    const auto list = [](shape extents) {
        return manifest{{{"w", dtype::bf16, extents}, {"k", dtype::bf16, {4, 2}}}};
    };
    const auto checkpoint = list({6, 4});
    const auto worker = manifest{
        {{"d", dtype::bf16, {3, 4}}, {"e", dtype::bf16, {2, 4, 2}}, {"m", dtype::bf16, {5, 4}}}};
    recorder r{checkpoint, worker};
    const auto w = r.source("w");
    const auto k = r.source("k");
    const auto d = r.destination("d");
    const auto e = r.destination("e");
    const auto m = r.destination("m");
    refused([&] { loaders::column_parallel(w, d, {0, 4}); }, "w", "4 ranks cannot share equally");
    refused([&] { loaders::row_parallel(w, d, {0, 3}); }, "w", "dimension 1 has 4 elements");
    refused([&] { loaders::column_parallel(w, d, {2, 2}); }, "w", "rank 2 of 2 does not exist");
    refused([&] { loaders::column_parallel(w, d, {0, 0}); }, "w", "rank 0 of 0");
    refused([&] { loaders::column_parallel(w, d, {0, 1}); }, "w", "the destination is [3, 4]");
    refused([&] { loaders::row_parallel(w[0], d, {0, 1}); }, "w", "no dimension 1");
    refused([&] { loaders::fused_qkv(w, k, k, d, {6, 4}, {0, 4}); }, "w", "6 heads cannot be");
    refused([&] { loaders::fused_qkv(w, k, k, d, {6, 4}, {0, 6}); }, "k", "4 heads cannot be");
    refused([&] { loaders::fused_qkv(w, k, k, d, {4, 4}, {0, 2}); }, "w", "no 4 heads of equal");
    refused([&] { loaders::fused_qkv(w, w, w, d, {2, 2}, {0, 2}); }, "d", "too few rows");
    const auto first = w.narrow(0, 0, 1);
    refused(
        [&] {
            loaders::fused_qkv(first, first, first, m, {1, 1}, {0, 1});
        },
        "m", "more than the 3 rows");
    refused([&] { loaders::fused_gate_up(w, w, d, {0, 2}); }, "d", "should have 6 rows");
    const auto open = [&](std::int64_t) { return loaders::expert_sources{w, w, w}; };
    refused([&] { loaders::stacked_experts(open, e, e, 5, {0, 2}); }, "e", "5 experts");
    refused([&] { loaders::stacked_experts(open, e, e, 6, {0, 2}); }, "e", "room for 3 experts");
    refused([&] { loaders::transposed_experts(w, w, e, e, {0, 1}); }, "w", "3 dimensions");
    refused([&] { loaders::vocabulary_parallel(w, d, 7, {0, 3}); }, "w", "vocabulary of 7");
    refused([&] { loaders::vocabulary_parallel(w, d, 5, {0, 1}); }, "d", "have no room for 5");
    const auto two = d.narrow(0, 0, 2);
    refused([&] { loaders::vocabulary_parallel(w, two, 5, {0, 2}); }, "d", "have no room for 5");
}

}  // namespace
