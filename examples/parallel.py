"""Experts split over two processes: each reads and holds half of them, and the tokens are those of one process.

Run: torchrun --nproc-per-node 2 examples/parallel.py      (alone, it starts the two processes by itself)
"""

import os
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

from hf_mxfp4 import MXFP4Config, demo_model_path


def main() -> None:
    torch.distributed.init_process_group("gloo")  # "nccl" on GPUs
    path = demo_model_path()
    layout = DistributedConfig.from_dict({"fsdp_size": 2, "ep_size": 2})  # before Transformers 5.19 FSDP alone
    options = {"quantization_config": MXFP4Config(), "dtype": torch.float32}  # bfloat16 rounds what is exchanged
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=layout, **options)
    prompt = AutoTokenizer.from_pretrained(path)("MACBETH.\nIs this a dagger", return_tensors="pt")
    split = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    held = sum(p.to_local().nbytes for name, p in model.named_parameters() if name.endswith(("_blocks", "_scales")))
    if torch.distributed.get_rank() == 0:
        one = AutoModelForCausalLM.from_pretrained(path, **options)
        whole = one.generate(**prompt, max_new_tokens=16, do_sample=False)
        print(f"{held / 1e6:.3f} MB of packed experts in each process")
        print("the same tokens as one process:", torch.equal(split, whole))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        subprocess.run([*torchrun, __file__], check=True)
