// SPDX-License-Identifier: Apache-2.0

// What a lying worker or trainer says while a pull is planned: each message is refused or comes
// back as it was, a route that does not fit is refused or gives all bytes, and a part that an owner
// accepts reads only what it holds, each element once.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/ownership.hpp>
#include <weightwire/plan/pull_accept.hpp>
#include <weightwire/plan/pull_needs.hpp>
#include <weightwire/plan/pull_plan.hpp>
#include <weightwire/plan/pull_routing.hpp>
#include <weightwire/plan/recorder.hpp>
#include <weightwire/wire/pull_node_codec.hpp>
#include <weightwire/wire/pull_plan_codec.hpp>

namespace {

using namespace weightwire;

void require(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "pull_plan_fuzz: %s\n", what);
        std::abort();
    }
}

/// Two trainer ranks that both hold the middle, and a worker that takes some of everything.
struct problem {
    manifest checkpoint{{{"a", dtype::u8, {16, 8}},
                         {"b", dtype::bf16, {6000}},
                         {"c", dtype::f32, {4, 4}},
                         {"d", dtype::u8, {40}}}};
    manifest kept{{{"x", dtype::u8, {16, 4}},
                   {"b", dtype::bf16, {6000}},
                   {"y", dtype::f32, {4, 4}},
                   {"z", dtype::u8, {20}}}};
    std::vector<std::size_t> groups{1, 2, 1};
    plan::ownership owners{checkpoint,
                           {plan::position_set{{{0, 3}}}, plan::position_set{{{1, 4}}}}};
    plan::places where{{1, 2}, {3}};
    plan::plan_options options{.chunk_bytes = 4096};
    plan::pull_needs needs{checkpoint, kept, plan::record(checkpoint, kept, [](plan::recorder& r) {
                               r.source("a").narrow(1, 2, 4).copy_to(r.destination("x"));
                               r.source("b").copy_to(r.destination("b"));
                               r.source("c").t().copy_to(r.destination("y"));
                               r.source("d").slice(0, 0, {}, 2).copy_to(r.destination("z"));
                           })};
};

void report(const problem& p, std::string_view bytes) {
    const auto made = wire::decode_needs_report(bytes, p.checkpoint.size());
    require(wire::encode(made) == bytes, "a report has two spellings");
    const std::vector<plan::needs_report> all{made};
    const auto routes = plan::route(p.checkpoint, p.owners, p.where, all);
    std::uint64_t needed = 0;
    for (const auto& one : made.needs) {
        needed += one.bytes;
    }
    require(routes.owner_bytes()[0] + routes.owner_bytes()[1] == needed, "bytes are not routed");
}

void route(const problem& p, std::string_view bytes) {
    const auto made = wire::decode_worker_route(bytes, p.owners);
    require(wire::encode(made) == bytes, "a route has two spellings");
    const auto planned =
        plan::plan_worker(p.checkpoint, p.groups, p.owners, p.needs, made, p.options);
    require(planned.bytes() == p.needs.bytes(), "a plan has not all bytes");
    for (const auto owner : planned.owners()) {
        const auto part = planned.part_for(owner);
        require(plan::accept(p.checkpoint, p.groups, p.owners.held(owner), part, p.options, owner,
                             planned.worker()) == plan::hash_of(part),
                "an owner has another hash");
    }
}

void worker(const problem& p, std::string_view bytes) {
    const auto made = wire::decode_worker_needs(bytes, p.checkpoint.size());
    require(made.node.size() <= wire::longest_node_name, "a node has a long name");
    require(wire::encode(made) == bytes, "what a worker says has two spellings");
}

void landings(std::string_view bytes) {
    constexpr std::size_t workers = 300;
    const auto made = wire::decode_worker_landings(bytes, workers);
    require(wire::encode(made) == bytes, "a list of landing memories has two spellings");
    for (const auto& one : made) {
        require(one.worker >= 0 && one.worker < static_cast<int>(workers),
                "there is no such worker");
    }
}

void part(const problem& p, std::string_view bytes) {
    const auto made = wire::decode_owner_part(bytes, p.checkpoint.size());
    require(wire::encode(made) == bytes, "a part has two spellings");
    constexpr int owner = 0;
    (void)plan::accept(p.checkpoint, p.groups, p.owners.held(owner), made, p.options, owner,
                       made.worker);
    std::set<std::pair<std::size_t, std::uint64_t>> read;
    for (const auto& section : made.sections) {
        for (const auto& chunk : section.chunks) {
            require(chunk.bytes <= p.options.chunk_bytes, "a chunk is above the budget");
            plan::for_each_read(section, chunk, p.checkpoint, [&](std::size_t i, std::uint64_t at) {
                const auto& one = section.reads[i];
                require(p.owners.held(owner).contains(one.source), "a read of what is not held");
                const auto item = plan::item_bytes_of(p.checkpoint[one.source]);
                require(at + one.bytes(item) <= chunk.bytes, "a read leaves its chunk");
                plan::for_each_read_run(one, item, [&](auto from, auto, auto count) {
                    require(from + count <= p.checkpoint[one.source].byte_size(),
                            "a read leaves its parameter");
                    for (std::uint64_t k = 0; k < count; ++k) {
                        require(read.insert({one.source, from + k}).second, "a byte is read twice");
                    }
                });
            });
        }
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const problem p;
    const std::string_view bytes{reinterpret_cast<const char*>(data), size};
    const auto kind = size > 3 ? bytes[3] : '\0';
    try {
        if (kind == 'N') {
            report(p, bytes);
        } else if (kind == 'R') {
            route(p, bytes);
        } else if (kind == 'W') {
            worker(p, bytes);
        } else if (kind == 'L') {
            landings(bytes);
        } else {
            part(p, bytes);
        }
    } catch (const protocol_error&) {
    } catch (const mismatch_error&) {
    }
    return 0;
}
