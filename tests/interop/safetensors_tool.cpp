// SPDX-License-Identifier: Apache-2.0
// safetensors_tool write FILE   writes one tensor of every dtype that the format spells
// safetensors_tool list PATH    prints every tensor of a checkpoint, one a line, tabs between:
//                               name, the format's dtype, torch's, the header's shape, digest

#include <cstddef>
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/core/digest.hpp>
#include <weightwire/sources/safetensors.hpp>

namespace {

using namespace weightwire;

void write_all(const std::string& path) {
    std::vector<std::byte> memory(dtype_table.size() * 512);
    for (std::size_t i = 0; i < memory.size(); ++i) {
        memory[i] = static_cast<std::byte>(i * 37 / 5 & 0xFFU);
    }
    std::vector<named_tensor> tensors;
    std::size_t offset = 0;
    for (const auto& row : dtype_table) {
        if (!row.safetensors.empty()) {
            tensors.push_back({row.safetensors, {memory.data() + offset, row.value, {3, 8}}});
            offset += tensors.back().tensor.byte_size();
        }
    }
    tensors.push_back({"without \"bytes\" \xc3\xa9", {memory.data(), dtype::f32, {0, 5}}});
    tensors.push_back({"scalar", {memory.data(), dtype::f64, {}}});
    write_safetensors(path, tensors, {{"format", "pt"}, {"note", "a \"quoted\" line\n"}});
}

void list_all(const std::string& path) {
    const safetensors_source source{path};
    for (const auto& [name, tensor, stream] : source.weights()) {
        const auto& row = traits_of(tensor.type());
        const auto header_shape = shape_to_safetensors(row.value, tensor.extents());
        std::printf("%s\t%s\t%s\t%s\t%s\n", std::string{name}.c_str(),
                    std::string{row.safetensors}.c_str(), std::string{row.torch}.c_str(),
                    to_string(*header_shape).c_str(), digest_text(digest(tensor.bytes())).c_str());
    }
}

}  // namespace

int main(int count, char** arguments) {
    const std::string_view verb = count == 3 ? arguments[1] : "";
    try {
        if (verb == "write") {
            write_all(arguments[2]);
        } else if (verb == "list") {
            list_all(arguments[2]);
        } else {
            std::fprintf(stderr, "usage: safetensors_tool write FILE | list PATH\n");
            return 2;
        }
    } catch (const std::exception& problem) {
        std::fprintf(stderr, "%s\n", problem.what());
        return 1;
    }
    return 0;
}
