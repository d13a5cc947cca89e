"""Draw the pictures of the pages anew, each by the script that the gallery names::

    pip install '.[examples]' && python docs/pictures.py

They are committed, so that the pages are built from the files alone.  Each is made small: about as wide as a page, with
a palette of its own.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image  # comes with matplotlib

ROOT = Path(__file__).resolve().parents[1]
PICTURES = Path(__file__).with_name("pictures")

#: For each picture: what draws it, the file that this writes, the width shown, and the colours of its palette.
DRAWN = {
    "demo": (["-m", "cupyconv", "demo"], "cupyconv-demo.png", 380, 128),
    "denoise": (["examples/denoise.py"], "denoise.png", 800, 40),
    "digits": (["examples/train_digits.py"], "digits.png", 1000, 64),
    "edges": (["examples/edges.py", "--output", "edges.png"], "edges.png", 1000, 128),
    "memory": (["examples/densenet_block.py", "--output", "memory.png"], "memory.png", 800, 32),
    "co2": (["examples/forecast_co2.py"], "co2.png", 1000, 64),
}


def draw(name: str) -> None:
    """Run one script in a folder that is thrown away, and keep its picture."""
    (first, *arguments), written, width, colours = DRAWN[name]
    script = [str(ROOT / first)] if first.endswith(".py") else [first]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, *script, *arguments], cwd=folder, check=True)
        picture = Image.open(Path(folder, written)).convert("RGB")
        picture.thumbnail((width, picture.height), Image.Resampling.LANCZOS)
        picture.quantize(colours, dither=Image.Dither.NONE).save(PICTURES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or DRAWN:
        draw(name)
        print(f"{name}.png: {(PICTURES / f'{name}.png').stat().st_size:,} bytes")
