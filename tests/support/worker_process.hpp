#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/http/http_sync_client.hpp>

extern char** environ;

namespace tests {

/// A `test_worker` process (tests/support/test_worker.cpp) and questions to it. Killed with this
/// object.
class worker_process {
public:
    /// @param arguments as the program takes them.
    /// @param name of the program, beside the test program.
    explicit worker_process(std::vector<std::string> arguments, std::string name = "test_worker")
        : arguments_{std::move(arguments)}, name_{std::move(name)} {
        start();
    }
    worker_process(const worker_process&) = delete;
    worker_process& operator=(const worker_process&) = delete;
    ~worker_process() { kill(); }

    [[nodiscard]] std::string url() const { return "http://127.0.0.1:" + std::to_string(port_); }
    void signal(int number) const { ::kill(process_, number); }
    [[nodiscard]] pid_t process() const noexcept { return process_; }
    /// SIGSTOP, and waits until every thread of it has stopped: until then it may still answer.
    void stop() const {
        signal(SIGSTOP);
        if (!is_stopped()) {
            throw std::runtime_error{"the worker process does not stop"};
        }
    }
    /// Whether a signal has stopped it, and nobody has resumed it. Waits a moment for it to be so.
    [[nodiscard]] bool is_stopped() const {
        for (int tries = 0; tries < 200; ++tries) {
            siginfo_t state{};
            if (::waitid(P_PID, static_cast<id_t>(process_), &state,
                         WSTOPPED | WNOHANG | WNOWAIT) == 0 &&
                state.si_pid == process_) {
                return true;
            }
            std::this_thread::sleep_for(std::chrono::milliseconds{5});
        }
        return false;
    }
    /// SIGKILL, and waits until it is gone.
    void kill() {
        if (process_ > 0) {
            ::kill(process_, SIGCONT);
            ::kill(process_, SIGKILL);
            ::waitpid(process_, nullptr, 0);
            ::close(input_);
            process_ = -1;
        }
    }
    /// A new process on the same port, as after a crash.
    void restart() {
        kill();
        auto again = arguments_;
        again.insert(again.end(), {"--port", std::to_string(port_)});
        std::swap(arguments_, again);
        start();
        std::swap(arguments_, again);
    }
    /// Whether it has ended, within `limit`.
    [[nodiscard]] bool ends_within(std::chrono::milliseconds limit) {
        for (auto waited = std::chrono::milliseconds{0}; waited < limit;
             waited += std::chrono::milliseconds{5}) {
            if (::waitpid(process_, nullptr, WNOHANG) == process_) {
                ::close(input_);
                process_ = -1;
                return true;
            }
            std::this_thread::sleep_for(std::chrono::milliseconds{5});
        }
        return false;
    }

    [[nodiscard]] weightwire::http_answer ask(std::string_view method, std::string_view path,
                                              std::string_view body = {}) const {
        weightwire::http_sync_client client{url()};
        return client
            .request(method, path, {.bodies = {&body, 1}},
                     weightwire::deadline::after(std::chrono::seconds{10}))
            .front()
            .answer;
    }
    [[nodiscard]] std::string version() const {
        return nlohmann::json::parse(ask("GET", "/weight_info").body)
            .at("weight_version")
            .get<std::string>();
    }
    [[nodiscard]] int health() const { return ask("GET", "/health").status; }
    /// `{name: digest}` of what it serves.
    [[nodiscard]] nlohmann::json checksums() const {
        return nlohmann::json::parse(
                   ask("POST", "/weight_checker", R"({"action":"checksum"})").body)
            .at("checksums");
    }

private:
    [[nodiscard]] std::string program_path() const {
        std::string path(4096, '\0');
        const auto length = ::readlink("/proc/self/exe", path.data(), path.size());
        path.resize(length > 0 ? static_cast<std::size_t>(length) : 0);
        return path.substr(0, path.rfind('/') + 1) + name_;
    }
    void start() {
        auto program = program_path();
        std::vector<char*> argv{program.data()};
        for (auto& argument : arguments_) {
            argv.push_back(argument.data());
        }
        argv.push_back(nullptr);
        std::array<int, 2> to{};
        std::array<int, 2> from{};
        if (::pipe2(to.data(), O_CLOEXEC) != 0 || ::pipe2(from.data(), O_CLOEXEC) != 0) {
            throw std::runtime_error{"no pipe"};
        }
        posix_spawn_file_actions_t actions;
        ::posix_spawn_file_actions_init(&actions);
        ::posix_spawn_file_actions_adddup2(&actions, to[0], STDIN_FILENO);
        ::posix_spawn_file_actions_adddup2(&actions, from[1], STDOUT_FILENO);
        const int status =
            ::posix_spawn(&process_, program.c_str(), &actions, nullptr, argv.data(), environ);
        ::posix_spawn_file_actions_destroy(&actions);
        ::close(to[0]);
        ::close(from[1]);
        input_ = to[1];
        std::string line;
        for (char byte = 0; status == 0 && ::read(from[0], &byte, 1) == 1 && byte != '\n';) {
            line += byte;
        }
        ::close(from[0]);
        if (line.empty()) {
            throw std::runtime_error{"the test worker did not start: " + program};
        }
        port_ = std::stoi(line);
    }

    std::vector<std::string> arguments_;
    std::string name_;
    pid_t process_ = -1;
    int input_ = -1;
    int port_ = 0;
};

}  // namespace tests
