// Browser runs a headless Chromium for tests, one command at a time: each line of standard input is a JSON object, and
// so is each line of the answer. It ends, and the browser with it, when standard input ends. It has its own module, so
// that what drives the browser does not get into the module of the program.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/heapprofiler"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/systeminfo"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// command is a line of input. One of its fields says what to do.
type command struct {
	Open       string `json:"open"`       // go to this address, and wait until it is loaded
	Eval       string `json:"eval"`       // evaluate this, and wait for a promise
	Keys       string `json:"keys"`       // type this; {Enter}, {Tab} and so on are keys
	Click      string `json:"click"`      // click at the middle of what this selects
	Screenshot string `json:"screenshot"` // write a PNG to this file
	Dark       *bool  `json:"dark"`       // prefer dark colours, or light ones
	Script     *bool  `json:"script"`     // run scripts, or do not
	Size       []int  `json:"size"`       // of the window, in pixels
	Requests   bool   `json:"requests"`   // which addresses were asked for so far
	Processes  bool   `json:"processes"`  // numbers of the renderers' processes
	Fresh      bool   `json:"fresh"`      // forget cookies
}

// answer is a line of output.
type answer struct {
	Value any    `json:"value,omitempty"`
	Error string `json:"error,omitempty"`
}

// patience is how long a command may take.
const patience = 60 * time.Second

// browser is the browser with what it has done.
type browser struct {
	mu       sync.Mutex
	requests []string
	problems []string // errors of the console, exceptions, and what a policy of the page forbade
}

func main() {
	out := json.NewEncoder(os.Stdout)
	if err := serve(out); err != nil {
		_ = out.Encode(answer{Error: err.Error()})
		os.Exit(1)
	}
}

// serve runs the commands of standard input. The first argument of the program is the directory of the browser, and the
// others are NAME=IP: hosts that the browser finds there.
func serve(out *json.Encoder) error {
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.NoSandbox, chromedp.DisableGPU,
		chromedp.Flag("disable-component-update", true), chromedp.WindowSize(1280, 800), chromedp.UserDataDir(os.Args[1]))
	var rules []string
	for _, host := range os.Args[2:] {
		name, ip, _ := strings.Cut(host, "=")
		rules = append(rules, "MAP "+name+" "+ip)
	}
	if len(rules) > 0 {
		options = append(options, chromedp.Flag("host-resolver-rules", strings.Join(rules, ",")))
	}
	allocator, end := chromedp.NewExecAllocator(context.Background(), options...)
	defer end()
	ctx, end := chromedp.NewContext(allocator)
	defer end()

	// Remember what happens from the start.
	b := &browser{}
	if err := chromedp.Listen(ctx, b.note); err != nil {
		return err
	}
	messages := chromedp.Console(ctx)
	go func() {
		for m, err := range messages {
			if err == nil && (m.IsException() || m.Type == "error" || m.Type == "warning") {
				b.mu.Lock()
				b.problems = append(b.problems, m.String())
				b.mu.Unlock()
			}
		}
	}()
	if _, err := chromedp.Call(ctx, network.Enable, network.EnableParams{}); err != nil {
		return err
	}

	if err := out.Encode(answer{Value: "ready"}); err != nil {
		return err
	}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var c command
		var a answer
		err := json.Unmarshal(lines.Bytes(), &c)
		if err == nil {
			limited, cancel := context.WithTimeout(ctx, patience)
			a.Value, err = b.run(limited, c)
			cancel()
		}
		if err != nil {
			a.Error = err.Error()
		}
		if err := out.Encode(a); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return chromedp.Cancel(ctx) // which waits until the browser has ended
}

// note remembers requests.
func (b *browser) note(event any) {
	if e, ok := event.(*network.EventRequestWillBeSent); ok {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.requests = append(b.requests, e.Request.URL)
	}
}

// run does what a command says.
func (b *browser) run(ctx context.Context, c command) (value any, err error) {
	switch {
	case c.Open != "":
		return nil, chromedp.Do(ctx, chromedp.Navigate(c.Open))
	case c.Eval != "":
		return chromedp.Run(ctx, chromedp.Evaluate[any](c.Eval, chromedp.EvalAwaitPromise))
	case c.Keys != "":
		return nil, press(ctx, keyNames.Replace(c.Keys))
	case c.Click != "":
		return nil, chromedp.Do(ctx, chromedp.Click(chromedp.CSS(c.Click)))
	case c.Screenshot != "":
		png, err := chromedp.Run(ctx, chromedp.CaptureScreenshot())
		if err != nil {
			return nil, err
		}
		return nil, os.WriteFile(c.Screenshot, png, 0o644)
	case len(c.Size) == 2:
		return nil, chromedp.Do(ctx, chromedp.EmulateViewport(int64(c.Size[0]), int64(c.Size[1])))
	case c.Requests:
		b.mu.Lock()
		defer b.mu.Unlock()
		value = map[string][]string{"requests": b.requests, "problems": b.problems}
		b.requests, b.problems = nil, nil
		return value, nil
	case c.Processes:
		return renderers(ctx)
	}

	return nil, b.set(ctx, c)
}

// set changes what the browser is like.
func (b *browser) set(ctx context.Context, c command) (err error) {
	switch {
	case c.Dark != nil:
		scheme := "light"
		if *c.Dark {
			scheme = "dark"
		}
		_, err = chromedp.Call(ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
			Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}})
	case c.Script != nil:
		_, err = chromedp.Call(ctx, emulation.SetScriptExecutionDisabled,
			emulation.SetScriptExecutionDisabledParams{Value: !*c.Script})
	case c.Fresh:
		_, err = chromedp.Call(ctx, network.ClearBrowserCookies, cdp.Empty{})
	default:
		err = errors.New("the command is empty")
	}
	return err
}

// keyNames are keys that are no characters.
var keyNames = strings.NewReplacer("{Enter}", kb.Enter, "{Tab}", kb.Tab, "{Escape}", kb.Escape, "{Space}", " ")

// press presses and releases keys. A key and its character are one event, as with a keyboard: a page that handles the
// key can keep its character from being typed.
func press(ctx context.Context, keys string) error {
	for _, r := range keys {
		events := kb.Encode(r)
		down := *events[0]
		for _, e := range events {
			if e.Type == input.DispatchKeyEventTypeChar {
				down.Type, down.Text, down.UnmodifiedText = input.DispatchKeyEventTypeKeyDown, e.Text, e.UnmodifiedText
			}
		}
		for _, e := range []input.DispatchKeyEventParams{down, *events[len(events)-1]} {
			if _, err := chromedp.Call(ctx, input.DispatchKeyEvent, e); err != nil {
				return err
			}
		}
	}
	return nil
}

// renderers returns the numbers of the processes that render pages, after a collection of garbage.
func renderers(ctx context.Context) ([]int64, error) {
	// What earlier pages have left says nothing about this one.
	if _, err := chromedp.Call(ctx, heapprofiler.CollectGarbage, cdp.Empty{}); err != nil {
		return nil, err
	}

	all, err := chromedp.CallBrowser(ctx, systeminfo.GetProcessInfo, cdp.Empty{})
	pids := []int64{}
	for _, p := range all.ProcessInfo {
		if p.Type == "renderer" {
			pids = append(pids, p.ID)
		}
	}
	return pids, err
}
