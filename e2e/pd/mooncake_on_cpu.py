"""A plugin of vLLM: MooncakeConnector asks for the current CUDA device, and a machine without one has the CPU. `setup.sh` installs it."""


def register():
    import torch

    torch.accelerator.current_device_index = lambda: 0
