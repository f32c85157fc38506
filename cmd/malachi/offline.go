package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
	"github.com/malachilog/malachi/storage/datadir"
	"github.com/malachilog/malachi/storage/rangelog"
	"github.com/malachilog/malachi/storage/segment"
	"github.com/malachilog/malachi/storage/vfs"
)

// folder is a data folder that is looked at while no broker runs on it.
type folder struct {
	*vfs.OS
	path string
	lock io.Closer
}

// openFolder opens a data folder, and locks it, so that no broker starts on it meanwhile. It makes nothing: a path that is no data folder
// gives errNothingHere. Errors beside: storage.ErrFolderRefused for one in use, of a newer format, or with a damaged marker.
func openFolder(dir string) (_ *folder, err error) {
	if dir == "" {
		return nil, usage("name the data folder with --data")
	}
	st, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist), err == nil && !st.IsDir():
		return nil, fmt.Errorf("%s is not a folder: %w", dir, errNothingHere)
	case err != nil:
		return nil, fmt.Errorf("open data folder: %w", err)
	}
	marker, err := os.ReadFile(filepath.Join(dir, "MALACHI"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s is not a data folder (it has no file MALACHI): %w", dir, errNothingHere)
	}
	if err != nil {
		return nil, fmt.Errorf("open data folder: %w", err)
	}
	if _, err := datadir.Parse(marker); err != nil {
		return nil, fmt.Errorf("data folder %s: %w", dir, err)
	}
	f := &folder{path: dir}
	if f.OS, err = vfs.NewOS(dir); err != nil {
		return nil, fmt.Errorf("open data folder: %w", err)
	}
	if f.lock, err = f.Lock("LOCK"); err != nil {
		if errors.Is(err, vfs.ErrLocked) {
			err = fmt.Errorf("%w: a broker runs on it; stop it first", storage.ErrFolderRefused)
		}
		return nil, errors.Join(fmt.Errorf("data folder %s: %w", dir, err), f.Close())
	}
	return f, nil
}

// leave releases the folder.
func (f *folder) leave(err error) error { return errors.Join(err, f.lock.Close(), f.Close()) }

// dataFlag adds --data.
func dataFlag(cmd *cobra.Command, data *string) {
	cmd.Flags().StringVar(data, "data", "", "the data `FOLDER` of a broker that does not run (required)")
}

// listFolder lists the segment files of one topic, or of all.
func listFolder(dir, topic string) (_ *v1.ListSegmentsResponse, err error) {
	f, err := openFolder(dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = f.leave(err) }()
	all := &v1.ListSegmentsResponse{}
	if err := f.walk("segments", topic, all); err != nil {
		return nil, err
	}
	if len(all.GetSegments()) == 0 {
		return nil, fmt.Errorf("%s has no segment file%s: %w", dir, map[bool]string{true: " of topic " + topic}[topic != ""], errNothingHere)
	}
	return all, nil
}

func (f *folder) walk(dir, topic string, all *v1.ListSegmentsResponse) error {
	entries, err := f.List(dir)
	if vfs.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list %s: %w", dir, err)
	}
	for _, e := range entries {
		name := path.Join(dir, e.Name)
		if e.Dir {
			err = f.walk(name, topic, all)
		} else if path.Ext(name) == ".seg" {
			err = f.add(name, topic, all)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (f *folder) add(name, topic string, all *v1.ListSegmentsResponse) (err error) {
	file, err := f.Open(name)
	if err != nil {
		return fmt.Errorf("open %s: %w", name, err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	h, raw, err := segment.ReadHeader(file)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if topic != "" && h.Topic != topic {
		return nil
	}
	s := &v1.Segment{
		Id: h.ID.String(), Range: h.ID.Range.String(), State: v1.Segment_OPEN, Base: uint64(h.Base), CreateTime: timestamppb.New(unix(h.CreateTime)),
	}
	size, err := file.Size()
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if t, err := segment.ReadFooter(file, size, int64(len(raw))); err == nil {
		end, bytes := uint64(t.End), uint64(t.Pos)
		s.State, s.End, s.Bytes, s.Digest = v1.Segment_SEALED, &end, &bytes, fmt.Sprintf("%016x", uint64(t.Digest))
	}
	all.Segments = append(all.Segments, s)
	return nil
}

func unix(t storage.Time) time.Time { return time.Unix(0, int64(t)) }

func newSegmentVerify(std streams) *cobra.Command {
	var data string
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Read every byte of a data folder and check it",
		Long: "Read every batch of every segment file and every journal group that a recovery would replay, and check them. Nothing is\n" +
			"written. Exit code 8: something is damaged; it says which file, where and why. 3: there is nothing to check.",
		Example: "  malachi segment verify --data malachi-data",
		Args:    noArgs,
	}
	dataFlag(cmd, &data)
	out := listFlag(cmd)
	cmd.RunE = func(*cobra.Command, []string) (err error) {
		f, err := openFolder(data)
		if err != nil {
			return err
		}
		defer func() { err = f.leave(err) }()
		var each func(string, rangelog.Report)
		if isTerminal(std.err) {
			each = func(_ string, r rangelog.Report) {
				fmt.Fprintf(std.err, "\r\x1b[K%d files, %d bytes", r.Files, r.Bytes)
			}
			defer fmt.Fprint(std.err, "\r\x1b[K")
		}
		r, err := rangelog.Verify(f, each)
		if err != nil {
			return verifyError(data, err)
		}
		if r.Nothing {
			return fmt.Errorf("%s has neither a journal nor a segment file: %w", data, errNothingHere)
		}
		return showReport(std, out.value, r)
	}
	return cmd
}

// verifyError gives damage its exit code and the path as a person can open it.
func verifyError(data string, err error) error {
	if d, ok := errors.AsType[*rangelog.FileDamage](err); ok {
		return fmt.Errorf("%s is damaged at byte %d: %w: %w", filepath.Join(data, filepath.FromSlash(d.Path)), d.Pos, errCheck, d.Reason)
	}
	return err
}

func showReport(std streams, format string, r rangelog.Report) error {
	if format == "table" {
		return showTable(std.out, func(row func(...any)) {
			row("FILES", "OPEN", "SEALED", "BATCHES", "OFFSETS", "BYTES", "JOURNAL ENTRIES")
			row(r.Files, r.Live, r.Sealed, r.Batches, r.Records, r.Bytes, r.JournalEntries)
		})
	}
	b, err := json.Marshal(map[string]any{
		"files": r.Files, "open": r.Live, "sealed": r.Sealed, "batches": r.Batches, "offsets": r.Records, "bytes": r.Bytes,
		"journalEntries": r.JournalEntries,
	})
	if err != nil {
		return fmt.Errorf("encode report: %w", err)
	}
	return showJSON(std.out, format, b)
}

func newSegmentRebuild(std streams) *cobra.Command {
	var data string
	cmd := &cobra.Command{
		Use:   "rebuild-index SEGMENT",
		Short: "Write the damaged footer of a sealed segment again",
		Long: "Write the footer of a sealed segment's file again from its batches, once all of them verify: equal to the byte to what it was, or\n" +
			"not at all. Exit code 8: a batch is damaged; nothing was written.",
		Args: oneArg("segment"),
	}
	dataFlag(cmd, &data)
	cmd.RunE = func(_ *cobra.Command, args []string) (err error) {
		id, err := parseSegmentID(args[0])
		if err != nil {
			return err
		}
		f, err := openFolder(data)
		if err != nil {
			return err
		}
		defer func() { err = f.leave(err) }()
		done, err := rangelog.RebuildIndex(f, id)
		switch {
		case err != nil:
			return offlineError(data, err)
		case done:
			say(std.err, "the index of %s was written again", id)
		default:
			say(std.err, "%s is intact; nothing was written", id)
		}
		return nil
	}
	return cmd
}

func offlineError(data string, err error) error {
	switch {
	case errors.Is(err, storage.ErrUnknownSegment):
		return fmt.Errorf("%w: %w", err, errNothingHere)
	case errors.Is(err, storage.ErrConflict):
		return fmt.Errorf("%w: an open segment has no index on disk yet", err)
	}
	return verifyError(data, err)
}

func newSegmentDump(std streams) *cobra.Command {
	var data string
	cmd := &cobra.Command{
		Use:   "dump SEGMENT",
		Short: "Show the parts of a segment's file: header, batches, footer",
		Long: "Show the header, the batches that verify, and the footer of a segment's file, without the records. Exit code 8: it ended at\n" +
			"something damaged.",
		Example: "  malachi segment dump 4010b4d881322bc509da147005f2c151/0000000000000000-1/0 --data malachi-data",
		Args:    oneArg("segment"),
	}
	dataFlag(cmd, &data)
	out := outputFlag(cmd, "text for people, or one JSON object a line", "text", "json")
	cmd.RunE = func(_ *cobra.Command, args []string) (err error) {
		id, err := parseSegmentID(args[0])
		if err != nil {
			return err
		}
		f, err := openFolder(data)
		if err != nil {
			return err
		}
		defer func() { err = f.leave(err) }()
		err = rangelog.Dump(f, id, func(p rangelog.Piece) error { return showPiece(std.out, out.value, p) })
		if err != nil {
			return offlineError(data, err)
		}
		return nil
	}
	return cmd
}

// field is one named value of a piece.
type field struct {
	name  string
	value any
}

func showPiece(w io.Writer, format string, p rangelog.Piece) error {
	kind, fields := pieceFields(p)
	var line strings.Builder
	if format == "json" {
		m := map[string]any{"part": kind, "pos": p.Pos}
		for _, f := range fields {
			m[f.name] = f.value
		}
		b, err := json.Marshal(m)
		if err != nil {
			return fmt.Errorf("encode part: %w", err)
		}
		line.Write(b)
	} else {
		fmt.Fprintf(&line, "%10d %-6s", p.Pos, kind)
		for _, f := range fields {
			fmt.Fprintf(&line, " %s=%s", f.name, cell(f.value))
		}
	}
	line.WriteByte('\n')
	if _, err := io.WriteString(w, line.String()); err != nil {
		return fmt.Errorf("write output: %w", err)
	}
	return nil
}

func pieceFields(p rangelog.Piece) (kind string, fields []field) {
	stamp := func(t storage.Time) string { return unix(t).UTC().Format(time.RFC3339Nano) }
	switch {
	case p.Header != nil:
		h := p.Header
		var parents []string
		for _, l := range h.Lineage {
			parents = append(parents, fmt.Sprintf("%s@%d", l.Range, l.End))
		}
		return "header", []field{
			{"segment", h.ID.String()}, {"topic", h.Topic}, {"slice", h.Slice.String()}, {"base", h.Base}, {"created", stamp(h.CreateTime)},
			{"parents", strings.Join(parents, ",")}, {"producerTableBytes", len(h.Table)},
		}
	case p.Batch != nil:
		b := p.Batch
		kind := map[batch.Kind]string{batch.KindData: "data", batch.KindControl: "control"}[b.Kind]
		return "batch", []field{
			{"base", b.Base}, {"end", b.End()}, {"kind", kind}, {"codec", b.Codec.String()}, {"bytes", b.Size()}, {"plainBytes", b.PlainBytes},
			{"slice", b.Slice.String()}, {"appended", stamp(b.AppendTime)}, {"producer", b.Producer.String()}, {"epoch", b.Epoch},
			{"sequence", b.Sequence},
		}
	}
	t := p.Footer
	return "footer", []field{
		{"end", t.End}, {"batches", t.Batches}, {"records", t.DataRecords}, {"digest", fmt.Sprintf("%016x", uint64(t.Digest))},
		{"firstAppend", stamp(t.FirstAppend)}, {"lastAppend", stamp(t.LastAppend)}, {"indexEntries", len(t.Index)},
	}
}
