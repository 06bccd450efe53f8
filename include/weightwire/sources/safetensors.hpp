#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <weightwire/sources/safetensors_header.hpp>
#include <weightwire/sources/safetensors_index.hpp>
#include <weightwire/sources/safetensors_source.hpp>
#include <weightwire/sources/safetensors_writer.hpp>

/// @file
/// Everything about safetensors checkpoints: `safetensors_source` reads one, `write_safetensors`
/// writes one; the parsers of headers and indices are pure.
