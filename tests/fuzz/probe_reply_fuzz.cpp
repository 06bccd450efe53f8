// SPDX-License-Identifier: Apache-2.0

// Replies of any server to the four questions of a probe: the probe never throws because of them,
// and every peer ends with a problem or with a profile that holds together.
//
// Input: for each of the four replies one byte that picks the status, then the body up to a line
// feed.

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/wire/probe.hpp>

namespace {

using namespace weightwire;

void require(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "probe_reply_fuzz: %s\n", what);
        std::abort();
    }
}

constexpr std::array<int, 8> statuses{200, 204, 400, 401, 404, 405, 500, 0};

class scripted_client {
public:
    explicit scripted_client(std::string_view script) : script_{script} {}
    [[nodiscard]] std::size_t peer_count() const { return 1; }
    [[nodiscard]] std::string_view peer_name(std::size_t) const { return "http://fuzz"; }
    std::vector<peer_reply> request(std::string_view, std::string_view, const control_message&,
                                    deadline, std::stop_token) {
        peer_reply reply{.peer = "http://fuzz"};
        if (script_.empty()) {
            reply.answer.fault = reply_fault::closed;
            return {reply};
        }
        const auto end = script_.find('\n');
        reply.answer.status = statuses[static_cast<unsigned char>(script_[0]) % statuses.size()];
        reply.answer.fault = reply.answer.status == 0 ? reply_fault::timed_out : reply_fault::none;
        reply.answer.body = script_.substr(1, end == script_.npos ? end : end - 1);
        script_.remove_prefix(end == script_.npos ? script_.size() : end + 1);
        return {reply};
    }

private:
    std::string_view script_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    scripted_client client{{reinterpret_cast<const char*>(data), size}};
    const auto profiles = wire::probe(client, deadline::after(std::chrono::seconds{10}));
    require(profiles.size() == 1, "there is not one profile a peer");
    const auto& profile = profiles.front();
    if (profile.ok()) {
        require(profile.world_size >= 1, "a server without workers is accepted");
        require(!profile.native || profile.has_session_routes, "a worker of ours has no sessions");
        require(profile.has_weight_info || profile.weight_version.empty(),
                "a version from nowhere");
    } else {
        require(profile.problem.context.peer == "http://fuzz", "a problem without its peer");
        require(!profile.problem.message().empty(), "a problem without a message");
    }
    return 0;
}
