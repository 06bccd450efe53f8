// SPDX-License-Identifier: Apache-2.0
//
// A shared library with the names of libnccl and no GPU behind them: what opening, binding and
// bounding are tested with. FAKE_NCCL_VERSION is its version.

#include <chrono>
#include <cstring>
#include <thread>

#include <weightwire/nccl_api/nccl.hpp>

#define EXPORTED extern "C" __attribute__((visibility("default")))

/// Reached through the loader, as NCCL's calls of its own functions are: another copy's name would
/// take its place if the library were not deep-bound.
EXPORTED int fake_nccl_own_version() { return FAKE_NCCL_VERSION; }

EXPORTED ncclResult_t ncclGetVersion(int* version) {
    *version = fake_nccl_own_version();
    return ncclSuccess;
}
EXPORTED ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    std::memset(id->internal, 1, sizeof id->internal);
    return ncclSuccess;
}
/// A join that never ends.
EXPORTED ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int, ncclUniqueId, int,
                                             ncclConfig_t*) {
    static int nothing = 0;
    *made = reinterpret_cast<ncclComm_t>(&nothing);
    return ncclInProgress;
}
EXPORTED ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* result) {
    *result = ncclInProgress;
    return ncclSuccess;
}
/// Returns as little as the real one may.
EXPORTED ncclResult_t ncclCommAbort(ncclComm_t) {
    std::this_thread::sleep_for(std::chrono::hours{1});
    return ncclSuccess;
}
EXPORTED ncclResult_t ncclBroadcast(const void*, void*, size_t, ncclDataType_t, int, ncclComm_t,
                                    cudaStream_t) {
    return ncclInProgress;
}
EXPORTED ncclResult_t ncclAllReduce(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t,
                                    ncclComm_t, cudaStream_t) {
    return ncclInProgress;
}
EXPORTED const char* ncclGetErrorString(ncclResult_t) { return "a word of the fake"; }
/// The last words, which a test sets; gives those before.
EXPORTED const char* fake_nccl_say(const char* words) {
    static const char* said = "";
    const char* const before = said;
    said = words != nullptr ? words : said;
    return before;
}
EXPORTED const char* ncclGetLastError(ncclComm_t) { return fake_nccl_say(nullptr); }
