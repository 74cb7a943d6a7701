"""Stands in for `sgl_kernel`, SGLang's CUDA kernels, which cannot be loaded without a GPU.

Installed as sgl_kernel/__init__.py. SGLang imports many of its names and, with `--device cpu` and the attention and
sampling of PyTorch, calls none of them: so there is every name and every module below it, and calling one says what it
is.
"""

import importlib.machinery
import sys
import types


class Absent:
    """What a name stands for."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *arguments, **named):
        raise NotImplementedError(f"{self._name} is a CUDA kernel, and this is a stand-in for it")


class Below(types.ModuleType):
    """Any module below this one."""

    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class Finder:
    """Finds all of them."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(name, Finder, is_package=True)
        return None

    @staticmethod
    def create_module(spec):
        return Below(spec.name)

    @staticmethod
    def exec_module(module):
        pass


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(f"{__name__}.{name}")


sys.meta_path.append(Finder)
