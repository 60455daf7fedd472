"""The colours of every figure: the palette of Okabe and Ito, which stays apart under every common colour blindness."""

BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, GREY, INK = "#56B4E9", "#CC79A7", "#8C8C8C", "#222222"
SERIES_COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY)
