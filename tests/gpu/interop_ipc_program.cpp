// SPDX-License-Identifier: Apache-2.0
//
// Our trainer and our worker over CUDA IPC, for interop_ipc.py: with vLLM's classes on the other
// side, or with each other. LIST has a parameter a line: name, torch's dtype, extents (weights.py
// prints one).
//
//   interop_ipc_program train LIST URL ROUNDS packed|unpacked
//                             [--form bytes|strided|pool|f32] [--check N] [--watch PID]
//                             [--buffer BYTES]
//       weights in device memory that change every round; prints each round's digest. strided:
//       matrices have gaps between their rows, small ones are transposed. pool: every third tensor
//       is in memory of a pool, which has no handle. f32: what the list calls
//       bfloat16 is float32 here, and the worker converts. --check compares, every N rounds, the
//       digest of every tensor with what the worker says that it has. --watch prints the memory of
//       this process, of that one and of the device after a tenth of the rounds and at the end, and
//       fails where it has grown
//   interop_ipc_program serve LIST in_place|flip|copy_in [--convert]
//       prints its port, serves from device memory until its input ends

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/backends/cuda_ipc/backend.hpp>
#include <weightwire/core/convert.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/gpu/check.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/sinks/device_memory.hpp>
#include <weightwire/trainer.hpp>
#include <weightwire/worker.hpp>

#include "../../benchmarks/support/device_weights.hpp"
#include "../../benchmarks/support/parameter_lists.hpp"
#include "../support/serving_tool.hpp"

namespace {

using namespace weightwire;
using benchmarks::device_weights;

constexpr std::chrono::seconds patience{90};
deadline soon() { return deadline::after(patience); }

// --- The trainer's weights.

/// What a trainer sends, and the digests that whoever gets it must find.
struct sent_weights {
    std::vector<named_tensor> tensors;
    std::vector<std::uint64_t> digests;
    std::size_t bytes = 0;  ///< as the worker counts them
};

constexpr std::uint64_t allocation_bytes = std::uint64_t{20} << 20U;  ///< about as torch's

/// Memory from cudaMallocAsync.
class pool_memory {
public:
    explicit pool_memory(std::size_t bytes) {
        void* made = nullptr;
        gpu::check(cudaMallocAsync(&made, bytes, nullptr), "cudaMallocAsync");
        data_.reset(static_cast<std::byte*>(made));
        gpu::check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
    }
    [[nodiscard]] std::byte* data() const noexcept { return data_.get(); }

private:
    struct give_back {
        void operator()(std::byte* data) const noexcept { cudaFreeAsync(data, nullptr); }
    };
    std::unique_ptr<std::byte, give_back> data_;
};

/// The list's own dtypes. Where strided, what is allocated is larger than what is sent.
class raw_weights {
public:
    raw_weights(const std::vector<param_meta>& list, bool strided, bool pool)
        : memory_{strided ? padded(list) : manifest{list}, 0, allocation_bytes} {
        for (std::size_t i = 0; i < list.size(); ++i) {
            const mutable_tensor_view& whole = memory_.views()[i];
            tensor_view view = whole;
            if (strided && list[i].shape.size() == 2) {
                tensor_view::strides_type steps{};
                if (is_small(list[i])) {
                    steps[0] = 1;
                    steps[1] = list[i].shape[0];
                } else {
                    steps[0] = list[i].shape[1] + gap;
                    steps[1] = 1;
                }
                view = {whole.data(), list[i].dtype, list[i].shape, steps, whole.device()};
            }
            if (pool && i % 3 == 0 && view.byte_size() != 0) {
                const auto& own = pools_.emplace_back(view.byte_size());
                copies_.push_back({own.data(), view.data(), view.byte_size()});
                view = {own.data(), list[i].dtype, list[i].shape, whole.device()};
            }
            sent.tensors.push_back({.name = list[i].name, .tensor = view});
            views_.push_back(view);
            sent.bytes += view.byte_size();
        }
        sent.digests.resize(list.size());
    }
    void fill(std::uint64_t round) {
        memory_.fill(round);
        for (const auto& [to, from, bytes] : copies_) {
            gpu::check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice), "cudaMemcpy");
        }
        gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        machine_.digests(views_, sent.digests, soon(), {});
    }
    sent_weights sent;

private:
    static constexpr std::int64_t gap = 8;  ///< elements after each row
    [[nodiscard]] static bool is_small(const param_meta& one) {
        return one.byte_size() <= std::uint64_t{1} << 17U;
    }
    [[nodiscard]] static manifest padded(std::vector<param_meta> list) {
        for (auto& each : list) {
            if (each.shape.size() == 2 && !is_small(each)) {
                each.shape = shape{each.shape[0], each.shape[1] + gap};
            }
        }
        return manifest{std::move(list)};
    }

    device_weights memory_;
    std::vector<pool_memory> pools_;
    std::vector<cuda_ipc::byte_move> copies_;  ///< to the pools, each round
    std::vector<tensor_view> views_;
    cuda_ipc::cuda_machinery machine_{0};
};

/// `f32` where the list says `bf16`: finite values, and the digests of what they convert to.
class wide_weights {
public:
    explicit wide_weights(const std::vector<param_meta>& list)
        : list_{list}, memory_{manifest{widened(list)}, 0, allocation_bytes} {
        for (std::size_t i = 0; i < list.size(); ++i) {
            sent.tensors.push_back({.name = list[i].name, .tensor = memory_.views()[i]});
            sent.bytes += list[i].byte_size();
        }
        sent.digests.resize(list.size());
    }
    void fill(std::uint64_t round) {
        for (std::size_t i = 0; i < list_.size(); ++i) {
            const auto& to = memory_.views()[i];
            host_.resize(to.byte_size());
            narrow_.clear();
            auto word = static_cast<std::uint32_t>(round * 2654435761U + i * 40503U + 1);
            for (std::size_t at = 0; at < host_.size(); at += 4) {
                word = word * 1664525U + 1013904223U;
                // Finite, from subnormals to half of the largest.
                const auto value = std::ldexp(static_cast<float>(static_cast<std::int32_t>(word)),
                                              static_cast<int>(word % 256U) - 159);
                std::memcpy(host_.data() + at, &value, std::min<std::size_t>(4, host_.size() - at));
                narrow_.push_back(bf16_from_f32(value));
            }
            sent.digests[i] = list_[i].dtype == dtype::bf16
                                  ? digest(std::as_bytes(std::span{narrow_}))
                                  : digest(host_);
            gpu::check(cudaMemcpy(to.data(), host_.data(), host_.size(), cudaMemcpyHostToDevice),
                       "cudaMemcpy");
        }
    }
    sent_weights sent;

private:
    [[nodiscard]] static std::vector<param_meta> widened(std::vector<param_meta> list) {
        for (auto& each : list) {
            each.dtype = each.dtype == dtype::bf16 ? dtype::f32 : each.dtype;
        }
        return list;
    }

    std::vector<param_meta> list_;
    device_weights memory_;
    std::vector<std::byte> host_;
    std::vector<std::uint16_t> narrow_;
};

// --- What is compared and watched.

/// Tensors whose digest at the worker is not what was sent.
std::size_t differing(http_sync_client<>& client, const sent_weights& sent) {
    const std::string_view body = R"({"action":"checksum"})";
    const auto reply = client.request("POST", "/weight_checker", {.bodies = {&body, 1}}, soon());
    const auto& answer = reply.front().answer;
    if (answer.status != 200) {
        throw std::runtime_error{"/weight_checker answers " + std::to_string(answer.status) + ": " +
                                 std::string{answer.body}};
    }
    const auto theirs = nlohmann::json::parse(answer.body).at("checksums");
    std::size_t count = theirs.size() == sent.tensors.size() ? 0 : 1;
    for (std::size_t i = 0; i < sent.tensors.size(); ++i) {
        const std::string name{sent.tensors[i].name};
        if (theirs.value(name, std::string{}) != digest_text(sent.digests[i])) {
            std::fprintf(stderr, "%s differs\n", name.c_str());
            ++count;
        }
    }
    return count;
}

/// Memory now, in bytes.
struct memory_use {
    std::uint64_t trainer = 0;
    std::uint64_t worker = 0;
    std::uint64_t device = 0;
};

/// Bytes of a process that are in memory.
std::uint64_t resident(const std::string& process) {
    std::ifstream file{"/proc/" + process + "/statm"};
    std::uint64_t all = 0;
    std::uint64_t pages = 0;
    if (!(file >> all >> pages)) {
        throw std::runtime_error{"no process " + process + " to watch"};
    }
    return pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

memory_use look(const std::string& worker, int round) {
    std::size_t free = 0;
    std::size_t total = 0;
    gpu::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    const memory_use now{resident("self"), resident(worker), total - free};
    std::printf("memory after round %d: trainer %llu, worker %llu, device %llu bytes\n", round,
                static_cast<unsigned long long>(now.trainer),
                static_cast<unsigned long long>(now.worker),
                static_cast<unsigned long long>(now.device));
    return now;
}

void require_no_growth(const memory_use& before, const memory_use& after) {
    constexpr std::uint64_t allowed = std::uint64_t{4} << 20U;  // of the host's allocator
    if (after.trainer > before.trainer + allowed || after.worker > before.worker + allowed ||
        after.device > before.device) {
        throw std::runtime_error{"memory has grown"};
    }
}

// --- The two programs.

struct training {
    std::vector<param_meta> list{};
    std::string url{};
    int rounds = 0;
    bool packed = false;
    std::uint64_t buffer_bytes = std::uint64_t{128} << 20U;
    std::string form = "bytes";
    int check_every = 0;
    std::string watched{};
};

struct chosen_events {
    void on(const event& what) const noexcept {
        if (what.kind == event_kind::chosen) {
            std::printf("chosen: %.*s\n", static_cast<int>(what.text.size()), what.text.data());
        }
    }
};

template <class Weights>
void train(const training& wanted, Weights weights) {
    cuda_ipc::trainer_init_info info;
    info.packed = wanted.packed;
    info.packed_buffer_size_bytes = wanted.buffer_bytes;
    http_sync_client<> client{wanted.url};
    const auto& sent = weights.sent;
    auto engine = trainer_init(info, client, span_source{sent.tensors}, {.init_budget = patience},
                               single_rank{}, chosen_events{});
    std::optional<memory_use> early;
    for (int round = 1; round <= wanted.rounds; ++round) {
        weights.fill(static_cast<std::uint64_t>(round));
        const auto report = engine.send_weights({.deadline = soon()});
        std::uint64_t sum = 0;
        for (const auto each : sent.digests) {
            sum += each;
        }
        std::fprintf(stderr, "round %d took %.4f s, data phase %.4f s\n", round,
                     report.total_seconds, report.data_seconds);
        std::printf("round %d: %zu tensors, %zu bytes, digest %s\n", round, sent.tensors.size(),
                    sent.bytes, digest_text(sum).c_str());
        if (wanted.check_every != 0 && round % wanted.check_every == 0) {
            const auto wrong = differing(client, sent);
            if (wrong != 0) {
                throw std::runtime_error{std::to_string(wrong) + " tensors differ in round " +
                                         std::to_string(round)};
            }
            std::printf("round %d: all digests equal\n", round);
        }
        if (!wanted.watched.empty() && round == std::max(1, wanted.rounds / 10)) {
            early = look(wanted.watched, round);
        }
        std::fflush(stdout);
    }
    if (early) {
        require_no_growth(*early, look(wanted.watched, wanted.rounds));
    }
    engine.close(deadline::after(std::chrono::seconds{10}));
}

void serve(std::vector<param_meta> list, commit_mode mode, bool convert) {
    device_parameter_table table{
        manifest{std::move(list)}, gpu_memory{0}, {.mode = mode, .convert_dtypes = convert}};
    worker_engine engine{cuda_ipc::backend{}, table};
    tests::serve_until_input_ends(engine);
}

std::optional<commit_mode> mode_named(std::string_view word) {
    for (const auto mode : {commit_mode::in_place, commit_mode::flip, commit_mode::copy_in}) {
        if (to_string(mode) == word) {
            return mode;
        }
    }
    return std::nullopt;
}

/// @returns whether they mean something.
bool run_train(const std::vector<std::string>& words) {
    training wanted{.list = benchmarks::read_list(words[1]),
                    .url = words[2],
                    .rounds = std::stoi(words[3]),
                    .packed = words[4] == "packed"};
    for (std::size_t i = 5; i + 1 < words.size(); i += 2) {
        if (words[i] == "--form") {
            wanted.form = words[i + 1];
        } else if (words[i] == "--check") {
            wanted.check_every = std::stoi(words[i + 1]);
        } else if (words[i] == "--watch") {
            wanted.watched = words[i + 1];
        } else if (words[i] == "--buffer") {
            wanted.buffer_bytes = std::stoull(words[i + 1]);
        } else {
            return false;
        }
    }
    if (wanted.form == "f32") {
        train(wanted, wide_weights{wanted.list});
    } else if (wanted.form == "bytes" || wanted.form == "strided" || wanted.form == "pool") {
        train(wanted, raw_weights{wanted.list, wanted.form == "strided", wanted.form == "pool"});
    } else {
        return false;
    }
    return true;
}

}  // namespace

int main(int count, char** arguments) {
    return tests::run_tool(
        "interop_ipc_program",
        "interop_ipc_program train LIST URL ROUNDS packed|unpacked "
        "[--form bytes|strided|pool|f32] [--check N] [--watch PID] [--buffer BYTES]\n"
        "       interop_ipc_program serve LIST in_place|flip|copy_in [--convert]",
        count, arguments, [](const std::vector<std::string>& words) {
            if (words.size() >= 5 && words.size() % 2 == 1 && words[0] == "train") {
                return run_train(words);
            }
            const auto mode = words.size() >= 3 ? mode_named(words[2]) : std::nullopt;
            const bool convert = words.size() == 4 && words[3] == "--convert";
            if (mode && words[0] == "serve" && (words.size() == 3 || convert)) {
                serve(benchmarks::read_list(words[1]), *mode, convert);
                return true;
            }
            return false;
        });
}
