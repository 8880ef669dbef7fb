r"""Laying out data sets that torchvision can download as OpenOOD has them.

Each split is downloaded with its checksum verified, its images are written under the names that
the manifest's pattern gives, and the list is written unless there is one already. An official
list is thus never replaced, and its images are found if they bear the official names.

Which images of CIFAR's test splits OpenOOD v1.5 uses for what.

OpenOOD holds 1,000 of the 10,000 test images out for ID validation, and takes 9,000 of those of
CIFAR-100 as the near set of CIFAR-10. The choice is a random draw that its list files record.
It is kept here as bit masks, so that images from another source can be laid out as OpenOOD has
them, and the lists written from scratch agree with OpenOOD's up to their order.

A mask has one bit an image: classes in alphabetical order, in each the images in the order of
the original data set.

References:
    | OpenOOD v1.5: Enhanced Benchmark for Out-of-Distribution Detection (Zhang et al., 2023)
    | https://arxiv.org/abs/2306.09301
"""

__all__ = ["DATASETS", "SUBSETS", "download", "subset_mask"]

import base64
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from urllib.error import URLError

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from ..errors import UserError, did_you_mean, one_line
from ..files import atomic_path
from .lists import write_list
from .manifests import Download, Manifest, SetSpec

ARCHIVES = ".ood_osdre_downloads"
#: The names of torchvision's classes.
DATASETS = {
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "fashion_mnist": "FashionMNIST",
    "mnist": "MNIST",
    "svhn": "SVHN",
}
FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG"}


class Split(Protocol):
    r"""What is needed of a torchvision data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Image.Image, int]: ...


log = logging.getLogger(__name__)


def download(
    manifest: Manifest, spec: SetSpec, data_root: Path, mirror: str | None = None
) -> Path:
    r"""Downloads a set, writes its images and, where there is none, its list.

    Arguments:
        manifest: The benchmark.
        spec: One of its sets, with a recipe to download it.
        data_root: The folder that holds lists and images.
        mirror: The URL of a folder that holds the archives, instead of the usual one.

    Returns:
        The path of the list.
    """
    recipe = spec.download
    if recipe is None:
        raise UserError(f"{spec.role} {spec.name}: cannot be downloaded. {manifest.get}")

    names, labels = [], []
    for name, image, label in tqdm(
        items(recipe, data_root / ARCHIVES, mirror), desc=f"writing {spec.name}", unit="image"
    ):
        path = data_root / manifest.images / name
        if not (path.is_file() and path.stat().st_size):
            write_image(path, image, recipe.quality)
        names.append(name)
        labels.append(label if spec.role.startswith("id_") else -1)

    path = manifest.path(spec, data_root)
    if path.exists():
        log.info("kept the list %s", path)
    else:
        write_list(path, names, labels)

    return path


def items(
    recipe: Download, archives: Path, mirror: str | None
) -> Iterator[tuple[str, Image.Image, int]]:
    r"""Yields the name, image and label of each image of a recipe."""
    if recipe.subset is not None and recipe.subset not in SUBSETS:
        raise UserError(f"no subset {recipe.subset!r}{did_you_mean(recipe.subset, SUBSETS)}")
    mask = None if recipe.subset is None else subset_mask(recipe.subset)

    for split in recipe.splits:
        dataset = fetch(recipe.dataset, split, archives, mirror)
        classes = getattr(dataset, "classes", [str(c) for c in range(10)])
        numbers = np.zeros(len(classes), dtype=int)

        for index in range(len(dataset)):
            image, label = dataset[index]
            number = int(numbers[label])
            numbers[label] += 1
            if mask is not None and not mask[label, number]:
                continue

            name = recipe.path.format(
                split=split,
                index=index + recipe.first,
                number=number + recipe.first,
                label=label,
                class_name=classes[label],
            )
            yield name, image, int(label)


def fetch(name: str, split: str, archives: Path, mirror: str | None) -> Split:
    r"""Returns one split of a torchvision data set, after downloading it if need be."""
    from torchvision import datasets

    if name not in DATASETS:
        raise UserError(f"no data set {name!r} to download{did_you_mean(name, DATASETS)}")

    kind = getattr(datasets, DATASETS[name])
    if mirror is not None:
        # The class name must stay: torchvision names a folder after it.
        kind = type(kind.__name__, (kind,), overrides(kind, mirror.rstrip("/") + "/"))
    which = {"split": split} if name == "svhn" else {"train": split == "train"}

    try:
        loaded: Split = kind(str(archives), download=True, **which)
        return loaded
    except (URLError, OSError, RuntimeError) as error:
        reason = one_line(error, 200)
        raise UserError(f"cannot download {name} ({split}) to {archives}: {reason}") from error


def overrides(kind: type, mirror: str) -> dict[str, object]:
    r"""Returns the attributes that make a torchvision class download from elsewhere."""
    if hasattr(kind, "split_list"):
        splits = {s: [mirror + file, file, md5] for s, (_, file, md5) in kind.split_list.items()}
        return {"split_list": splits}
    if hasattr(kind, "mirrors"):
        return {"mirrors": [mirror]}
    return {"url": mirror + vars(kind)["filename"]}


def write_image(path: Path, image: Image.Image, quality: int) -> None:
    r"""Writes an image under its name only once it is whole."""
    with atomic_path(path, flush=False) as temporary:
        image.save(temporary, format=FORMATS[path.suffix.lower()], quality=quality)


#: Packed bits, compressed, in base 85.
PACKED = {
    "cifar10_val": (
        "c-kdYyKWOf6g_i2j;@W1@g_)4stGcYgD94K!8lmRMGAvx=q$SY#jLYJD@2h*6ciLjG?aXT8!CQ-58>R|l`PNB+{d"
        "}+oY|C4X5V3tA7hY_ZP_gLa8QJZEN*X`4uePR0fDW@BVa5HfLCALxD~KkGT}KxQwa)VL@r#F9RGNZYs*vzk1nYy-"
        "%?a;tRUvNkG}71$<KfqtCS$IieeS{v{i;>O%nk`S+dxZ&z7o_gq-9i)bkcG8p^n3{EoqEQEf70B1BWtIjG<lksCZ"
        "jP4Gc33|j~oNF~`@{a}$tEVH%M7-5T$^CqC>>%HoNO>Aiuh&$SN3d1^E5jvcA1cTGHWK3;FkA)p?m@q(-@F<=jWQ"
        "hK8c&fOoJek9FYs{jwitsG25iV^@u=3<UMqYJD<N%d?h&4F$1CYOAYja^Do+lIqdI?j2trZOpTxF|GM89o);n4Vk"
        "yXM^XkdFmPnG-Q3NlXcKA|*5AD}qbhy3K#6c*e&gOITY`<I8cNIOM+gT_&CP)+m>fig?Ne5jpu9C@jgAV225n?z9"
        "Zr5dm8=NS40rWL<`S_yR32(du!u2|eD9Jttn;w3|#KiB(YViY6zR=_gC#DT~SiE*eGY=gPBp4AT3oA%<I~&Ryw}&"
        "2S)dR|!oq<B-bNIfdRiCN$2trTt_9Cqhz9JZlpepc0}SWm+lK-jn}Pc7Z1yT$w@po7Ou$26t#XV8-nSOpDKVb-7|"
        "iMcgGd@3BQXA9?JcnVAdtmn?an-2h=|;hBsEyN*@Ke5bsHF=6+*i9X<xKW_rH);<fBcbEjMf#ZyA8o>9yT3ELC)_"
        "+ip@`J?;lo%*An{Y*B?gifSe?6rlydhtDecTzZR_2usVPQ57Y|zn3dm*cvVugkXoC~dIeVWYh&^3uAN2!;@SXOYJ"
        "f4!&v@)lFBklq-Qfj2X+N}xgykkEgoQgm8K<u|37UQ+-{*r}|$@E<g8fjR"
    ),
    "cifar100_val": (
        "c-kdXv5sR!5Ud{0nz3c1S!1C+>4LW9z(N-oBEsIs3miHmG=FfPFz;!F9GcU8zzPu%@(Fth0TG|Tr%?55$<j=}p6c"
        "rA>WT*AKYzguFTjsL8yTsX;V0-ff5O2cSDjOxmsy$XSToiJSlRK#TZh6>$-ok|=7*du5#!7!GxR)_WZ}jK+x?Jj0"
        "><_m41AGz^qy~dSUlpHUq1)Wje(XL5J1;k`kr}AiYMoxEfGca(ybyFBlS<N)QE-`eaK&_#!08I7vQ%-oL4>lKw_f"
        "M*2FW$-Wx9FNFGJ;C9ndy53nfsk0onv?14QxmWM=~6Z5>q87T)r@}KZEa1>SiCg^;nnt4EFCrui^P~`%OMPc&(6?"
        "N4!Z#Lae--UX@8~^LAF+?@Dkb-b0X8whx^9^l<L}d<2ZgC==`t3EId3%g$JcE~Aj!E6~1lblJsEIGPgrStqXY5O&"
        "KO#F;OiI7=zB%NnRMs%YWhrI!$~H*E5V_5}2~!hnbcd8+Tc6Luv=x=9U_N2H7nD|G^8n+$hK9(vQ7+g!4aWHQJwD"
        "<}EdPV)cSn81MFU(aZaYr+GWGGStndx0fiBEck#h{J=RBNi5&DiT_ZzIiEZp7onmJLshMY8>r72kanl9CS>S0cXs"
        "YxU&B+0bcKA{boyklN|7K&4VdI`<-Jyafxw<3}DhaRSxw>GJn93B=j%tm*oB)5M_rT?qt$rco7GG|v7q?pbq{arM"
        "MtL9(YSj40}n0mP3;-yvwDDRcz(-DmX`l+C$Op}y%T8WB%(-vcIoa#sqEyRm*&4wh`%G)cM*#(zuLs6{LhOv|IOy"
        "6~4;5e>fd+w*6`HqmQCxuzc?xPs-g@B)IUKJz+k$yc+dxf0LMLmL)A4M~Jbg~7(&|L*l{=VDuLPO99KWO=}J_f(h"
        "OI~l>KzTBzwTJx^GCViZX`#`|QSRVaC~9%Ge(JMU0hJcINMswh25sP?KxW1GKWW{2W&"
    ),
    "cifar100_near_out": (
        "c-k#gv5r$Q5F9(cXcKbMUKF8#gtQkOQVNPEDoQ7cP(Tz1qM(eZ;4gg9D;^C>K|vWIM9n7z1O*+R0Dr=)A1Q1<dp$"
        "clI}X%P!s0P7!wA4~jU))`f{{X!l`i5;|75&J(EJ4v3S<WMLkO62T3G&$vy6NI>|MqlAVTU0J~o_WC@5eedkRscg"
        "!<$B2rVHE19QM>-5wRDC|oE8$w$vL0lHP6b>$R1?%<z}Wj;xUo-QQ?6oH`iTdTcjGzaVa2Io<T=NV-mEHL0g<cOh"
        "FxR)6*JrS-Xd??7VPeRh|1)9Y%<1U&#0<#OE1z?BFQ7st>ePaC2zOZiSAXDk9AU&$|&KDBz8FYhNMwmMk^fdB(aS"
        "<~vsRvZU4dx}l5p01Q?B>^*)g8L**y$pu;^3M`#4NoKKC$YoDr4e}y>c1gSsEf(axutq$zhsyu_OQF`)8Cpu>w7@"
        "T}5*hU1Gw<5tSyWwU(fRVt!W0pm;?Q%OgQ4_)NSPMM}m^UDh<-vbFNIC%*KSse}!?w@QAUl#28QKt*Gur~axBs--"
        "A~vgFFZDg0pA7)?vE*DbMY(T3*QoiQ%ax_O8qt(7a9IC68hb1Ji$IfdH`hMy=lCQNl5-|+Lw{;o)2FhPEii`ys{S"
        "8YLU+v%@L&60C_<0N>l)jlJ$4qKck#?D1Pl0!VYVh^pbBa9Lnr{ERR?<So8e<iy0db2d_Fw@zx_rF6o9ucWc45*I"
        "FUD$CEZN5h@7T-rOCosHOOFE_c7!dLmj&pi;jH4_5xIkO(e=bDdcAuhM@DMcER{0nSDYU`?fo(gmtL_-`oqGP>rd"
        "-_JFm9m?r1kKT?+SB|WQDbm->R|q*8zD}J8j;@WK!mnQ7Y?*ZN~Zk`tSqVOoCY7Nyz<9lgEoc$E#Wg>pJ?M1O>-i"
        "iqpHs9mfVdcaX+jliX(QOP;J@#TlnPzD346`F4Qp$Z;7nUGRs`kyhIhB*;H_4uts"
    ),
}

#: The masks by name, each a packed mask and whether it is the complement that is meant.
SUBSETS = {
    "cifar10_val": ("cifar10_val", False),
    "cifar10_test": ("cifar10_val", True),
    "cifar100_val": ("cifar100_val", False),
    "cifar100_test": ("cifar100_val", True),
    "cifar100_near": ("cifar100_near_out", True),
}


def subset_mask(name: str) -> NDArray[np.bool_]:
    r"""Returns one of :data:`SUBSETS` as a mask, with shape :math:`(C, 10000 / C)`."""
    key, is_complement = SUBSETS[name]
    data = zlib.decompress(base64.b85decode(PACKED[key]))
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8)).astype(bool)
    mask = bits.reshape(10 if name.startswith("cifar10_") else 100, -1)

    return ~mask if is_complement else mask
