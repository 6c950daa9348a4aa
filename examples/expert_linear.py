"""One routed expert linear on packed bytes, small enough to check by hand: y = shared + sum of p * W[e] @ x.

Two experts of one output row and K = 32 inputs. A byte holds two 4-bit codes, the even column in its low half; code 2
stands for 1.0 and code 4 for 2.0. A scale byte s multiplies its 32 weights by 2 ** (s - 127).
Run: python examples/expert_linear.py
"""

import torch

from hf_mxfp4 import dequantize, mxfp4_expert_linear


def main() -> None:
    blocks = torch.tensor([[[0x22] * 16], [[0x42] * 16]], dtype=torch.uint8)  # [E=2, N=1, K/2=16]
    scales = torch.tensor([[[127]], [[128]]], dtype=torch.uint8)  # [E=2, N=1, K/32=1]
    weights = dequantize(blocks, scales)
    print("expert 0:", weights[0, 0, :4].tolist(), "...  expert 1:", weights[1, 0, :4].tolist(), "...")
    # Expert 0 is 1, 1, ...: codes 1.0, scale 2 ** 0. Expert 1 is 2, 4, ...: codes 1.0 and 2.0, scale 2 ** 1.

    x = torch.ones(3, 32)
    experts = torch.tensor([[0, 1], [1, 1], [0, -1]])  # an id that is no expert's contributes nothing
    p = torch.tensor([[0.5, 0.25], [0.5, 0.5], [1.0, 9.0]])  # used as they are
    shared = torch.tensor([[100.0], [0.0], [0.0]])
    y = mxfp4_expert_linear(x, blocks, scales, experts, p, shared)

    # W[0] @ x = 32 * 1 = 32 and W[1] @ x = 16 * 2 + 16 * 4 = 96, so that
    by_hand = [100 + 0.5 * 32 + 0.25 * 96, 0.5 * 96 + 0.5 * 96, 1.0 * 32]
    print("y:", y.flatten().tolist(), " by hand:", by_hand)
    assert y.flatten().tolist() == by_hand


if __name__ == "__main__":
    main()
