package rpc

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"runtime/debug"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"connectrpc.com/connect/v2/connectproto"
	connectcors "connectrpc.com/cors"
	"connectrpc.com/grpchealth"
	"connectrpc.com/grpcreflect/v2"
	"github.com/rs/cors"
	"golang.org/x/sync/semaphore"

	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/gen/go/malachi/v1/malachiv1connect"
	"github.com/malachilog/malachi/services/rpc/codec"
	"github.com/malachilog/malachi/storage"
)

// maxMessageBytes bounds a received message: a request of the largest size with the framing of its fields.
const maxMessageBytes = storage.MaxRequestBytes + 64<<10

// Services are the three public services.
type Services struct {
	Produce malachiv1connect.ProduceServiceHandler
	Fetch   malachiv1connect.FetchServiceHandler
	Admin   malachiv1connect.AdminServiceHandler
}

// Deps are the handler's collaborators.
type Deps struct {
	Logger *slog.Logger
	// Observe, if not nil, is called once per call that has ended.
	Observe func(procedure string, code string, took time.Duration)
	// Health answers the gRPC health service for all services.
	Health grpchealth.Checker
}

// Handler serves Connect, gRPC and gRPC-Web on one mux, with reflection, health and CORS. Side-effect-free calls answer HTTP GET too.
func Handler(s Services, d Deps) http.Handler {
	server := connect.NewServer(d.interceptor(semaphore.NewWeighted(pageBudget)))
	malachiv1connect.RegisterProduceServiceHandler(server, s.Produce)
	malachiv1connect.RegisterFetchServiceHandler(server, s.Fetch)
	malachiv1connect.RegisterAdminServiceHandler(server, s.Admin)
	grpcreflect.Register(server)
	mux := http.NewServeMux()
	json := connectproto.NewJSONCodec()
	json.UnmarshalOptions.DiscardUnknown = false // a misspelt field is an error, not a default
	connecthttp.Mount(mux, server,
		connecthttp.WithCodecs(codec.New(), json),
		connecthttp.WithReadMaxBytes(maxMessageBytes),
		connecthttp.WithConditionalOptions(func(spec connect.Spec) []connecthttp.Option {
			switch spec.Procedure {
			case malachiv1connect.ProduceServiceProduceProcedure, malachiv1connect.FetchServiceFetchProcedure,
				malachiv1connect.FetchServiceSubscribeProcedure:
				// Batches are compressed by who built them; gzip on top makes these calls many times slower.
				return []connecthttp.Option{connecthttp.WithCompressors()}
			}
			return nil
		}),
	)
	path, health := grpchealth.NewHandler(d.Health)
	mux.Handle(path, health)
	return cors.New(cors.Options{
		// The broker listens on loopback and asks nobody who they are: only pages that this machine serves may use it.
		AllowOriginFunc: func(origin string) bool {
			u, err := url.Parse(origin)
			if err != nil {
				return false
			}
			ip := net.ParseIP(u.Hostname())
			return u.Hostname() == "localhost" || ip != nil && ip.IsLoopback()
		},
		AllowedMethods: connectcors.AllowedMethods(),
		AllowedHeaders: append(connectcors.AllowedHeaders(), "Authorization"),
		ExposedHeaders: connectcors.ExposedHeaders(),
		MaxAge:         7200,
	}).Handler(patientBodies(mux))
}

// interceptor gives every error its catalogue entry, keeps a panic to its call, and marks answers as not to be cached.
func (d Deps) interceptor(budget *semaphore.Weighted) connect.ServerInterceptor {
	return func(next connect.ServerFunc) connect.ServerFunc { return d.intercept(budget, next) }
}

func (d Deps) intercept(budget *semaphore.Weighted, next connect.ServerFunc) connect.ServerFunc {
	return func(ctx context.Context, spec connect.Spec, stream connect.ServerStream) (err error) {
		began := time.Now()
		defer func() {
			if r := recover(); r != nil {
				if r == http.ErrAbortHandler {
					panic(r)
				}
				d.Logger.Error("panic in a call", "procedure", spec.Procedure, "panic", fmt.Sprint(r), "stack", string(debug.Stack()))
				err = fmt.Errorf("panic in %s", spec.Procedure)
			}
			code := "ok"
			if err != nil {
				ce, known := wire(err)
				if !known {
					d.Logger.Error("call failed", "procedure", spec.Procedure, "error", err)
				} else {
					d.Logger.Debug("call refused", "procedure", spec.Procedure, "code", ce.Code().String(), "error", err)
				}
				code, err = ce.Code().String(), ce
			}
			if d.Observe != nil {
				d.Observe(spec.Procedure, code, time.Since(began))
			}
		}()
		if info, ok := connect.CallInfoForServerContext(ctx); ok && spec.IdempotencyLevel == connect.IdempotencyNoSideEffects {
			info.ResponseHeader().Set("Cache-Control", "no-store")
		}
		ctx, held := withScratch(ctx, budget)
		defer held.release() // the answer was encoded, or never will be
		return next(ctx, spec, stream)
	}
}

// ResultError is the per-batch form of an error.
func ResultError(err error) *v1.ProduceError {
	code, text, detail, _ := Describe(err)
	return &v1.ProduceError{Code: code.String(), Message: text, Detail: detail}
}
