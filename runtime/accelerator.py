"""The accelerator of this process: an NVIDIA or AMD GPU (both ``cuda`` in torch), an XPU, or a registered device.

Other modules use this module or ``torch.accelerator`` instead of ``torch.cuda``. They use ``torch.cuda`` only for
features that other devices lack: compute capabilities, NCCL's versions and records, and the allocator's history.
"""

import torch


def accelerator_type() -> str | None:
    """Return the device type of this machine's accelerators, such as ``cuda``; None if there are none.

    Apple GPUs (``mps``) do not count: torch does not support fp64 on them, and the totals of a step are summed in fp64.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type == "mps" else found.type


def accelerator_count() -> int:
    """Return the number of this machine's accelerators that this process may use."""
    return torch.accelerator.device_count() if accelerator_type() is not None else 0


def use_accelerator(device: torch.device) -> None:
    """Make ``device`` the current device of this process. Raises ``RuntimeError`` if its driver does not work."""
    module = torch.get_device_module(device)
    if hasattr(module, "init"):
        module.init()
    torch.accelerator.set_device_index(device)


def device_name(device: torch.device) -> str:
    """Return the device name as reported by the driver, or the type of the device."""
    name = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else str(name(device))


def device_names() -> list[str]:
    """Return the names of this machine's accelerators."""
    kind = accelerator_type()
    return [] if kind is None else [device_name(torch.device(kind, index)) for index in range(accelerator_count())]


def device_identity(device: torch.device) -> str | None:
    """Return a unique identifier of the accelerator; None if the driver does not provide one."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    identity = None if properties is None else getattr(properties(device), "uuid", None)
    return None if identity is None else str(identity)


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return the free and the total memory of an accelerator, in bytes."""
    free, total = torch.accelerator.get_memory_info(device)
    return int(free), int(total)


def wait_for_device(device: torch.device) -> None:
    """Wait until all queued work on ``device`` is done. Returns immediately for a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seed_accelerator(seed: int) -> None:
    """Seed the random number generator of the current accelerator, if this process has used one."""
    found = torch.accelerator.current_accelerator()
    if found is not None and _is_in_use(found):
        torch.get_device_module(found).manual_seed(seed)


def wait_for_stream() -> None:
    """Wait until all queued work on the current stream is done, if this process has used an accelerator."""
    found = torch.accelerator.current_accelerator()
    if found is not None and _is_in_use(found):
        torch.accelerator.current_stream().synchronize()


def _is_in_use(accelerator: torch.device) -> bool:
    return bool(getattr(torch.get_device_module(accelerator), "is_initialized", bool)())
