"""The grids of IQ1, IQ2 and IQ3: the vectors of eight (IQ3: four) small numbers that a quant of these formats is the index of.

Source: the tables of ggml (ggml-common.h, MIT), which their author chose from points of the E8 lattice; no formula gives them. They are
constants of the file format, and IQ1_M uses IQ1_S's. Each is stored as the ascending list of its vectors, read as numbers in base 3 (IQ3:
base 8) with element 0 as the lowest digit: the differences between neighbours, low bytes first and high bytes after them, deflated,
in base 85. They are unpacked at their first use.
"""

from __future__ import annotations

import base64
import functools
import zlib

import numpy as np

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.quant.bits import Floats


@dataclass(frozen=True)
class _Grid:
    """`rows` vectors of `width` numbers, each one of `values`."""

    rows: int
    width: int
    values: tuple[int, ...]


_TWO_BITS = (8, 25, 43)
_GRIDS = {
    "IQ2_XXS": _Grid(256, 8, _TWO_BITS),
    "IQ2_XS": _Grid(512, 8, _TWO_BITS),
    "IQ2_S": _Grid(1024, 8, _TWO_BITS),
    "IQ3_XXS": _Grid(256, 4, (4, 12, 20, 28, 36, 44, 52, 62)),
    "IQ3_S": _Grid(512, 4, (1, 3, 5, 7, 9, 11, 13, 15)),
    "IQ1_S": _Grid(2048, 8, (-1, 0, 1)),
}


@functools.cache
def grid(name: str) -> Floats:
    """The vectors of a format's grid, float32 [rows, width], in the order of their indices."""
    known = _GRIDS[name]
    planes = np.frombuffer(zlib.decompress(base64.b85decode(_STEPS[name])), np.uint8).reshape(2, known.rows).astype(np.int64)
    numbers = np.cumsum(planes[0] | planes[1] << 8)
    digits = numbers[:, None] // len(known.values) ** np.arange(known.width) % len(known.values)
    return np.array(known.values, np.float32)[digits]


_STEPS = {
    "IQ2_XXS": (
        "c-rMpL2AQ540OdJgb*f(Wm(L!7_$Upf-$BCQ+((lgyKU9Ig}jpk{t7ZzNK&Jd%D{`qdJVl%!rXH_$>re5KW#?2+-6~1T-~(TvW*@rPmhNgGMc0DSqeu!l&#b"
        "mAr?d#1qe16g#wCeFW6dnB#Z=bUT8XCOBuV?t{H~neNYj!AK^Ds0K2gJaI%xJICuKlV%<aFKrG*Na&mKbOyie2gY_?-%)++mzc~4jE`?X8-mE|Tlqp$+c~TI"
        "%XQ25kFI~2EnmM5pPh@_ji%~f*HiTadc+t6"
    ),
    "IQ2_XS": (
        "c-rld!D_=W42Fv^LI`7w5GD*$f+?Yl5K1XIj2?REX^fr6PCM<mXW1i9PM0q0D{KPW!m@sS{#URFcRg|19q>=_a)oG1E-3@LKzh>zj+ZZ(GGK6!n{OG1CgO!G"
        "m5eIbJHC;?sd$wT55aPg&3xs+qshwX)6ROL*W`xt{Y+YWq;42nEseEA7&Es%9&I`&4G+HYorB-(Gu>jci)5t$<JAwNiGUt^ri4R%LR467((}TgT&;n_dS7Ws"
        "SO|BxZ4>!OB{O_9RfxR8dsxTtB(8rs>`#Tt(ttFv31eqpk2p~ViMk%N%NP?wqPK#?b!3Q*=0{a`hj{9sf8BP+c2k*Y7_b<<X4z~%Rn5O0;s^tDarGa6I=%pq"
        "6B(f"
    ),
    "IQ2_S": (
        "c-rk#QEJ053@t_o5sVQggb>0gVT4jfKT62QK6i$lVIRH!0Vc(<<D}^>un3aMmLk3Pq@GM>@brrSOAuoS!U5+Sq>$hMfM`=A8fG7+6xh_pVlEVX^r>SG1IUGX"
        "Kp~NQVZ<#uyEKP2A6U0ulbqhHc!ZKXoOgZ!a(#h5L2e>9iorT%aaEvqmz<T9AS4KkR7nhF$SR!LaIW~anS)kN+y~5!fX2_tw$_w8M8gyi@=2PcNnT&C5f<<-"
        "HG7sq3HSwQg;B*hZu6*f@*4LSZ=T5?O0#MA!i(3cKw~;np<<1EEz^1gk}FK?1lO4$E8>YAe~G}C(l*~8G|vMtE+J0Kv%)Rtbh_f)B1qc9NTsHZVSqiEx*95D"
        "J%xIh)1FeO7xxYu4X;3F?v(CeI(T^fBkDT!*j63NCcS|!68g>|{|tP;m8~fZyqBlL4m<4M+Am$;8KD"
    ),
    "IQ3_XXS": (
        "c-rNSQBQ<05QMM8(gjMF3aveZcfg$_Xh@9s?3?;_@&ErDi+{sSCfS)xzBvFnNP)`-P<oj%u&Ij_GZ<89A+2DpozG1T(w%#co)E<C?Iaj=1T$WD&le3Ttuu68"
        "sO{>TjDID{$^l4d?nxEkgtW?frj;f+`l|neiI4kYu=$QK=#kstn)ajVw66Q14NLGwP}9vf%IUlFFq=ujErV<^7TU!@#^U*uwu|_)%H|-a@jO52?`eKpWCK*|"
        "*6O9t@2!N%4QM|P|NMRdlN}G4"
    ),
    "IQ3_S": (
        "c-rle*-is73`NQHHsfqF?X+}Qq#}?Iyd(bq&v43TKwc6@_PxjUT}p(M5`e@ipm+$3X#8<vA_iM!(Zom;A+e66N|Q3dK+33K${bH6?T&)TXLQMgwsynqr}B2w"
        "99H3g2AVa6Ba4w5n!;&NC^`8+2))FzY7V3d3zE|<v%fP{JPy#pt4_a?7*e4;?iyVYlm>rPT!<WEaQ5hjcpjzNvd(10JDJQi<vKz9i8rpu@?b;I#xw}76JP<c"
        "I7bj2?#2>sGg#ZC!nP_`i#qpuJYEAgzeXqFZ??EZwMv8=MA)U178wluibGC&fxqnQc9EQQ*N}|5659yo`Kq&v)_Y04N{QhVFK^|D?<?B(nCxj;?D>4qEIJkG"
        "U#&OVx6|VXzL@4nD7skgcp96tb-z$M$Eq)%%k}>K?*IJh^8;e|55W"
    ),
    "IQ1_S": (
        "c-rk%Nn+bD3=9^6lq@g3_y6zg3_w~++8@-2BXPw#1AQsQn!2`79Xa5`1yhw4&IyP8+kT5^SjNwcuNyWa!d;$tsmQ>BVk#JG$!2_F`tU=k-ozD${dQ{gs|occ"
        "F~l%9a6GQo4NgOHx=WtabXE*!o5eJWrGOU{OvZrW7XxV-mBVX#4wZ1!yjgmS2X?V)<vw<}@QwtdmKtR)N)2YT8GqXI+J;s!<tF^r;fIeX=V~8G*dLr)Pt&Q#"
        "eOT$(de=U~VaD9{$^;WosW_*Iw~I%4$v9D|cZvNvLy2Nks2Jd)*}>vf7O}cB{uEq-A>0)fVeFS0?O6e4(qNi{$P2h3Yby=6Yn2Z##V<F2BvX+I)9E;%H_Hb#"
        "a?2t?ll#{8IBbhmg?Wg_!enLC=bL%V)MMwJS!zbk&a0M{B%J9?+5!}Mo6wI82-^9V$Fi=4hD0Z;#b92nJ+>cv6o!%_UUowXzQp{*%k)a$(^8r@W5warPcF@k"
        "ttD|biHdEJO6q?;(-AHs_T{WxA-k-}TXdPXHL-P4Cw$jwGr39;BuD1FM0RB4y_I*Rr)GZEDdO+Y4U#J{th+c9R|d0Iy_`A{yy26Qc27bfZEzHXfQ3jplf=N<"
        "O&mzKJCOGz(bZ2Tr#^I<<)?b}CVeafY1-@<TV6(d4FI3isRV($i|?lPL}*C`PzD_>CLc{?;@pio*sNUc6DVT6TQ#vFnEYsZg+(uu$Yrnxo(IrI&&eGvvy;S*"
        "ZW{@siaQx_b}}80YQk`hb+HybAy*xe=#K30<pa%*Sglp}{fC413&~N!NJ0-;zAwh{-J}3Lk~1^57}G0MS8tWl;bYbYKWy+;Oav8RME`{&^>wLw7@*k_Ohj@Z"
        "7H2^Sq@7LG6UMU9=W(KAIb7|-is9&i+cxU+auCG#Z&f-!Xh~0bYS9$E(oh+EO#Nq5{DtVl*2f}#&n(PF5R3i#Vi-0wNn*gZOCoQA=Jw6{KueFoCZe}?Kaae<"
        "{rbp9KJt-|eB>klo%{jaj~Sr"
    ),
}
