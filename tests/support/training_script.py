"""A script that trains a planned model; tests interrupt and end it by signals."""

from __future__ import annotations

# arguments: the time limit in seconds, how many steps
TRAINING = """
import signal, sys, threading, time
import torch, remat

def tell_when_it_solves():
    while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        time.sleep(0.05)
    time.sleep(1.0)
    print("solving", flush=True)

def layer():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.LayerNorm(8))

model = torch.nn.Sequential(*(layer() for _ in range(12)))
remat.checkpoint(model, "45%", costs="flops", time_limit_s=float(sys.argv[1]), gap=0.0)
threading.Thread(target=tell_when_it_solves, daemon=True).start()
for _ in range(int(sys.argv[2])):
    model.zero_grad()
    model(torch.randn(64, 8)).sum().backward()
print(remat.report(model), flush=True)
"""
