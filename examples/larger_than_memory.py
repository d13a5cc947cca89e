"""Filter a Zarr volume that is larger than a worker's memory, and store the result as Zarr, with Dask.

python examples/larger_than_memory.py            on NumPy; needs Dask and Zarr: pip install '.[dask]'
python examples/larger_than_memory.py --cupy     on GPUs with one worker each; needs dask-cuda
"""

import argparse
import resource
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np

import cupyconv

MIB = 2**20


def gaussian(size: int, width: float) -> np.ndarray:
    """Return a Gaussian kernel (size, size, size) whose sum is 1."""
    line = np.exp(-0.5 * ((np.arange(size) - size // 2) / width) ** 2)
    line /= line.sum()
    return (line[:, None, None] * line[:, None] * line).astype(np.float32)


def filter_volume(source: Path, target: Path, weight: np.ndarray, cupy: bool) -> None:
    """Smooth the volume of one Zarr array into another, chunk by chunk, and show a progress bar."""
    import dask.array
    from dask.distributed import progress

    from cupyconv.interop.dask import conv

    volume = dask.array.from_zarr(source)
    if cupy:
        import cupy as cp

        volume, weight = volume.map_blocks(cp.asarray), cp.asarray(weight)
    smooth = conv(volume, weight, padding="same", padding_mode="symmetric")
    if cupy:
        smooth = smooth.map_blocks(cp.asnumpy)
    stored = smooth.to_zarr(target, compute=False).persist()
    progress(stored)
    stored.compute()


def peak_memory() -> int:
    """Return the peak memory of a worker, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cupy", action="store_true", help="compute on GPUs")
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--memory", type=int, default=512, help="memory limit of a worker in MiB (default 512)")
    parser.add_argument("--size", type=int, default=640, help="voxels along an axis of the volume (default 640)")
    arguments = parser.parse_args()

    import dask.array
    import zarr
    from dask.distributed import Client, LocalCluster

    if arguments.cupy:
        from dask_cuda import LocalCUDACluster

        cluster = LocalCUDACluster(dashboard_address=":0")  # any free port
    else:
        cluster = LocalCluster(
            n_workers=arguments.workers,
            threads_per_worker=1,
            memory_limit=arguments.memory * MIB,
            dashboard_address=":0",  # any free port
        )
    with tempfile.TemporaryDirectory() as directory, cluster, Client(cluster) as client:
        source, target = Path(directory, "volume.zarr"), Path(directory, "smooth.zarr")
        shape = (1, *(arguments.size,) * 3)  # one channel; a single sample needs no N axis
        noise = dask.array.random.default_rng(0).standard_normal(shape, dtype=np.float32, chunks=(1, 64, 64, 64))
        noise.to_zarr(source)

        weight = gaussian(5, 1.0)[None, None]
        start = perf_counter()
        filter_volume(source, target, weight, arguments.cupy)
        seconds = perf_counter() - start
        print()
        print(f"volume {noise.nbytes / MIB:.0f} MiB, filtered in {seconds:.1f} s")
        if not arguments.cupy:
            peak = max(client.run(peak_memory).values())
            print(f"peak memory of a worker {peak / MIB:.0f} MiB, limit {arguments.memory} MiB")

        # Compare a part that spans eight chunks with the call in memory.
        before, after = zarr.open(source, mode="r"), zarr.open(target, mode="r")
        expected = cupyconv.conv(before[:, 50:80, 50:80, 50:80], weight)
        difference = abs(expected - after[:, 52:78, 52:78, 52:78]).max()
        print(f"largest difference from the call in memory: {difference:.1e}")
        if not difference < 1e-6:
            sys.exit("the difference is too large")


if __name__ == "__main__":
    main()
