"""A plugin of SGLang: HiCache pins host memory and copies blocks by CUDA, and a machine without one does neither. `setup.sh` installs it.

Which blocks are copied, kept, loaded back and evicted, and what is published of it, is left to SGLang.
"""


def register():
    from sglang.srt.mem_cache.pool_host import common, mha

    common._cuda_host_register = lambda buffer, *granularity: None
    mha.transfer_kv_direct = copy


def copy(src_layers, dst_layers, src_indices, dst_indices, page_size):
    for source, destination in zip(src_layers, dst_layers):
        destination[dst_indices] = source[src_indices]
