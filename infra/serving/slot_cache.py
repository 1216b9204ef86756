"""Keys and values of many token streams side by side, each in a slot of its own, and attention over them."""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig

ATTENTION = "mgrpo_slots"

# Gathering reads and writes every key once before attention reads it again; a view over idle slots only reads.
_GATHER_COST = 3


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one forward pass whose attention is computed as one batch.

    Attributes:
        flat: which of the packed tokens belong to these rows.
        rows: the slots to read, a slice where they lie close together (no copy), else an index (copied).
        place: where each packed token goes in the [rows × width] grid of queries; None where it fills it in order.
        shape: (rows, width).
        keys: how many positions of a slot are read.
        bias: 0 where a query sees a position and -inf where it does not, float [rows, 1, groups · width, keys].
    """

    flat: slice
    rows: slice | torch.Tensor
    place: torch.Tensor | None
    shape: tuple[int, int]
    keys: int
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class Pass:
    """What attention must know of one forward pass over N packed tokens: where each is written, which rows read.

    `where` is slot · positions + position of each token, int64 [N].
    """

    cache: "SlotCache"
    where: torch.Tensor
    segments: tuple[Segment, ...]


class SlotCache:
    """Keys and values, [layer, slot, position, head, dimension], one tensor for each of the two.

    Pages are taken from the system as they are first written (numpy's zeros), so an unused slot costs nothing.
    """

    def __init__(self, config: PretrainedConfig, slots: int, positions: int, dtype: torch.dtype) -> None:
        self.layers = config.num_hidden_layers
        self.heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.groups = config.num_attention_heads // self.heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.positions = positions
        self.dtype = dtype
        shape = (self.layers, slots, positions, self.heads, self.head_dim)
        self.keys = _lazy_zeros(shape, dtype)
        self.values = _lazy_zeros(shape, dtype)

    @staticmethod
    def bytes_per_slot(config: PretrainedConfig, positions: int, dtype: torch.dtype) -> int:
        """Bytes of one full slot, keys and values of all layers."""
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * config.num_hidden_layers * positions * heads * head_dim * dtype.itemsize

    def fits(self, config: PretrainedConfig, dtype: torch.dtype) -> bool:
        """Whether a model of this config and dtype can use these slots."""
        positions = self.positions
        shape = SlotCache(config, slots=0, positions=positions, dtype=dtype).keys.shape
        return dtype == self.dtype and (shape[0], *shape[2:]) == (self.layers, *self.keys.shape[2:])

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give slot `target` the first `length` positions of slot `source`."""
        self.keys[:, target, :length] = self.keys[:, source, :length]
        self.values[:, target, :length] = self.values[:, source, :length]

    def clear(self, slot: int) -> None:
        """Zero a slot. Only NaN needs it: masked positions have weight 0, and 0 · NaN is NaN."""
        self.keys[:, slot] = 0
        self.values[:, slot] = 0

    def plan(self, row_P: np.ndarray, start_P: np.ndarray, feed_P: np.ndarray) -> Pass:
        """Plan a pass in which slot row_P[i] is fed feed_P[i] tokens from position start_P[i] on, packed in that order.

        Rows that are fed one token come first, then by rising feed.
        """
        first_P = np.cumsum(feed_P) - feed_P
        row_N = np.repeat(row_P, feed_P)
        position_N = np.arange(len(row_N)) + np.repeat(start_P - first_P, feed_P)
        segments = []
        begin = 0
        while begin < len(row_P):
            end = _segment_end(feed_P, begin)
            part = slice(begin, end)
            segments.append(self._segment(row_P[part], start_P[part], feed_P[part], int(first_P[begin])))
            begin = end
        return Pass(self, torch.from_numpy(row_N * self.positions + position_N), tuple(segments))

    def _segment(self, row_P: np.ndarray, start_P: np.ndarray, feed_P: np.ndarray, begin: int) -> Segment:
        width, count, keys = int(feed_P.max()), len(row_P), int((start_P + feed_P).max())
        low, high = int(row_P.min()), int(row_P.max()) + 1
        if high - low <= _GATHER_COST * count:
            rows, grid, line_P = slice(low, high), high - low, row_P - low
        else:
            rows, grid, line_P = torch.from_numpy(row_P), count, np.arange(count)
        # A line of the grid without a row sees position 0 only; nothing reads its result.
        seen = np.zeros((grid, width), dtype=np.int64)
        seen[line_P] = np.minimum(start_P[:, None] + np.arange(width), (start_P + feed_P - 1)[:, None])
        visible = np.arange(keys) <= seen[:, :, None]
        bias = np.where(visible, np.float32(0), np.float32(-np.inf))[:, None]
        if self.groups > 1:
            bias = np.tile(bias, (1, 1, self.groups, 1))
        total = int(feed_P.sum())
        place = None
        if grid * width != total or not np.array_equal(line_P, np.arange(count)):
            first_P = np.cumsum(feed_P) - feed_P
            offset = np.arange(total) - np.repeat(first_P, feed_P)
            place = torch.from_numpy(np.repeat(line_P, feed_P) * width + offset)
        return Segment(
            flat=slice(begin, begin + total),
            rows=rows,
            place=place,
            shape=(grid, width),
            keys=keys,
            bias=torch.from_numpy(bias).to(self.dtype),
        )

    def attend(self, layer: int, query: torch.Tensor, segment: Segment, scaling: float | None) -> torch.Tensor:
        """Attention of one segment: query [tokens, heads · groups, dim] -> the same shape.

        The queries that share a key head (`groups`) are laid along the query axis, so no key is ever repeated.
        """
        lines, width = segment.shape
        grid = query
        if segment.place is not None:
            grid = query.new_zeros((lines * width, *query.shape[1:]))
            grid[segment.place] = query
        grid = grid.view(lines, width, self.heads, self.groups, self.head_dim)
        grid = grid.permute(0, 2, 3, 1, 4).reshape(lines, self.heads, self.groups * width, self.head_dim)
        keys = self.keys[layer][segment.rows, : segment.keys].transpose(1, 2)
        values = self.values[layer][segment.rows, : segment.keys].transpose(1, 2)
        out = scaled_dot_product_attention(grid, keys, values, attn_mask=segment.bias, scale=scaling)
        out = out.view(lines, self.heads, self.groups, width, self.head_dim).permute(0, 3, 1, 2, 4)
        out = out.reshape(lines * width, self.heads * self.groups, self.head_dim)
        return out if segment.place is None else out[segment.place]

    def write(self, layer: int, where_N: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put keys and values [N, heads, dim] at flat places slot · positions + position."""
        self.keys[layer].view(-1, self.heads, self.head_dim).index_copy_(0, where_N, key)
        self.values[layer].view(-1, self.heads, self.head_dim).index_copy_(0, where_N, value)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001  # transformers' interface; our mask is in the plan
    scaling: float | None = None,
    slot_pass: Pass | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The attention interface of transformers, over a `SlotCache`: query [1, H, N, D] -> [1, N, H, D]."""
    assert slot_pass is not None
    if softcap is not None or s_aux is not None or sliding_window is not None:
        raise NotImplementedError("the embedded engine has no sliding window, soft cap or attention sink")
    cache, layer = slot_pass.cache, int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    cache.write(layer, slot_pass.where, key[0].transpose(0, 1), value[0].transpose(0, 1))
    query = query[0].transpose(0, 1)
    parts = [cache.attend(layer, query[s.flat], s, scaling) for s in slot_pass.segments]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _segment_end(feed_P: np.ndarray, begin: int) -> int:
    """Rows of one token are one segment; longer ones are batched while the widest is at most a quarter wider."""
    if feed_P[begin] == 1:
        return int(np.searchsorted(feed_P, 1, side="right"))
    return int(np.searchsorted(feed_P, max(int(feed_P[begin] * 1.25), int(feed_P[begin]) + 8), side="right"))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, dtype=size)).view(dtype)


AttentionInterface.register(ATTENTION, slot_attention)
