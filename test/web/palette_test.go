package web

import (
	"cmp"
	"image"
	"image/color"
	"image/png"
	"os"
	"slices"
	"testing"
)

// paletteOf chooses colours from those of a picture, in the order of how often they occur: the most frequent, and rare
// ones that are unlike all others, such as that of a dot.
func paletteOf(colors []color.RGBA) color.Palette {
	const most, frequent = 256, 200
	palette := color.Palette{}
	for _, c := range colors[:min(len(colors), frequent)] {
		palette = append(palette, c)
	}

	distance := func(a, b color.RGBA) int {
		r, g, b2 := int(a.R)-int(b.R), int(a.G)-int(b.G), int(a.B)-int(b.B)
		return r*r + g*g + b2*b2
	}
	apart := make([]int, len(colors)) // from the nearest colour that was chosen
	for i, c := range colors {
		apart[i] = 1 << 30
		for _, p := range palette {
			apart[i] = min(apart[i], distance(c, p.(color.RGBA)))
		}
	}
	for len(palette) < min(most, len(colors)) {
		far := 0
		for i := range colors {
			if apart[i] > apart[far] {
				far = i
			}
		}
		chosen := colors[far]
		palette = append(palette, chosen)
		for i, c := range colors {
			apart[i] = min(apart[i], distance(c, chosen))
		}
	}
	return palette
}

// shrink writes a picture again with the 256 colours that it has most of: half the bytes, and no difference that people
// see, as a page has few colours.
func shrink(t *testing.T, file string) {
	t.Helper()
	f, err := os.Open(file)
	must(t, err)
	picture, err := png.Decode(f)
	must(t, err, f.Close())

	counts := map[color.RGBA]int{}
	at := func(x, y int) color.RGBA { return color.RGBAModel.Convert(picture.At(x, y)).(color.RGBA) }
	bounds := picture.Bounds()
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			counts[at(x, y)]++
		}
	}
	colors := make([]color.RGBA, 0, len(counts))
	for c := range counts {
		colors = append(colors, c)
	}
	slices.SortFunc(colors, func(a, b color.RGBA) int {
		return cmp.Or(counts[b]-counts[a], cmp.Compare(a.R, b.R), cmp.Compare(a.G, b.G), cmp.Compare(a.B, b.B))
	})
	palette := paletteOf(colors)

	small := image.NewPaletted(bounds, palette)
	nearest := map[color.RGBA]uint8{}
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			c := at(x, y)
			i, ok := nearest[c]
			if !ok {
				i = uint8(palette.Index(c))
				nearest[c] = i
			}
			small.SetColorIndex(x, y, i)
		}
	}
	out, err := os.Create(file)
	must(t, err)
	must(t, (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(out, small), out.Close())
}
