// What the warps of `stream_key_value` share: the barriers of stream/pipe.cuh, with rows in a ring of their own.
#pragma once
#include "stream/kv_config.cuh"
#include "stream/pipe.cuh"

namespace la {

template <class Config>
struct KeyValuePipe : Pipe<Config> {
  using Base = Pipe<Config>;
  using Tile = typename Config::InnerTile;

  static LA_DEVICE void begin() {
    if (thread() == 0) Base::init_barriers();
    fence_async();
    sync_block();
  }

  static LA_DEVICE Tile k(i32 i) { return {Base::rows(i)}; }
  static LA_DEVICE Tile v(i32 i) { return {Base::rows(i) + Config::kTile}; }
  static LA_DEVICE Tile q(i32 slot) { return {Base::shared() + slot * Config::kSlot}; }
  static LA_DEVICE Tile g(i32 slot) { return {Base::shared() + slot * Config::kSlot + Config::kTile}; }
  static LA_DEVICE Tile second_result(const typename Base::Chunk& now) { return {Base::result(now).base + Config::kTile}; }
  static LA_DEVICE typename Config::WeightsTile weights() { return {Base::shared() + Config::kWeights}; }
  static LA_DEVICE typename Config::WeightsTile key_weights() { return {Base::shared() + Config::kWeights + Config::kWeightsTile}; }
  // Queries: what g and q of a slot are summed with.
  static LA_DEVICE typename Config::LinesTile value_lines(i32 slot) { return lines(2 * slot); }
  static LA_DEVICE typename Config::LinesTile key_lines(i32 slot) { return lines(2 * slot + 1); }
  static LA_DEVICE typename Config::LinesTile lines(i32 i) { return {Base::shared() + Config::kWeights + i * Config::kLinesTile}; }
  static LA_DEVICE typename Config::CopyTile copy() { return {Base::shared() + Config::kCopy}; }
  static LA_DEVICE float* delta(i32 slot) { return Base::numbers(Config::kDelta) + slot * Config::kChunk; }
  static LA_DEVICE float* offset(i32 slot) { return Base::numbers(Config::kOffset) + slot * Config::kChunk; }  // a / b |q|
  static LA_DEVICE float* along() { return Base::numbers(Config::kAlong); }
};

}  // namespace la
