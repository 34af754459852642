/** The coordinator as plain TypeScript: what tools of your own ask and order with. */

import { randomUUID } from "node:crypto";

import type { Message } from "@bufbuild/protobuf";
import { durationFromMs } from "@bufbuild/protobuf/wkt";

import { chunkFields, type Chunks } from "./chunks.js";
import { Connections } from "./connections.js";
import type { Connection, Token } from "./connection.js";
import { LmkvError } from "./errors.js";
import type { Operation as OperationMessage } from "./gen/google/longrunning/operations_pb.js";
import type { LookupResponse } from "./gen/lmkv/v1/cache_service_pb.js";
import { type PinnedChunks, type Position, Tier } from "./gen/lmkv/v1/chunk_pb.js";
import type { Instance } from "./gen/lmkv/v1/registry_service_pb.js";
import { LookupStream } from "./lookup-stream.js";
import { type ClearOperation, type MoveOperation, Operation } from "./operation.js";
import { parsePosition } from "./position.js";
import type { Tls } from "./tls.js";
import { type LayoutUpdate, watch, type WatchOptions } from "./watch.js";

export interface CoordinatorOptions {
  /** Most time that an answer may take; 5 unless told otherwise. */
  timeoutSeconds?: number;
  /** Speaks TLS. */
  tls?: Tls;
  /** What says who calls, where the coordinator wants to know; or what answers it for each call. */
  token?: Token;
}

/** What every order takes. */
export interface Order {
  /** Orders with the same id are carried out once, however often they are repeated; made up if none is given. */
  requestId?: string;
}

/** Chunks, and where from and where to: `INSTANCE`, `INSTANCE/TIER`, or a `Position`. */
export interface Move extends Chunks, Order {
  source: string | Position;
  destination: string | Position;
}

/** Chunks, where they are, and how long to keep them: 300 seconds unless told otherwise. */
export interface Pin extends Chunks, Order {
  position: string | Position;
  ttlSeconds?: number;
}

/** What to forget: chunks, or a model's, or everything; everywhere, or on one instance, or in one tier. */
export interface Clear extends Chunks, Order {
  instanceId?: string;
  tier?: Tier;
  everything?: boolean;
  /** The result only says what would be dropped. */
  dryRun?: boolean;
}

/**
 * A connection to the coordinator at `host:port`, or to several. It connects when first used, again after a loss.
 *
 * Of several, one is asked; the next takes its place when there is no answer, and the call is made again.
 *
 * Every call ends within `timeoutSeconds`. Calls throw `LmkvError`: the coordinator's own errors, each with its `reason`,
 * and `UNREACHABLE` if it does not answer. Answers are the messages of `lmkv.v1` themselves; `protos/lmkv/v1` says what
 * they hold. Closing is final and may be repeated.
 */
export class Coordinator implements Disposable {
  private readonly connections: Connections;

  /** Throws `CONFIG_ERROR` if the files of `tls` cannot be used. */
  constructor(
    address: string | readonly [string, ...string[]],
    { timeoutSeconds = 5, tls, token }: CoordinatorOptions = {},
  ) {
    const addresses = typeof address === "string" ? ([address] as const) : address;
    this.connections = new Connections(addresses, { timeoutSeconds, tls, token });
  }

  /** `host:port` of the coordinator that is asked now. */
  get address(): string {
    return this.connections.current.address;
  }

  /** Closes the connection; calls still running, and those to come, throw `CLOSED`. */
  close(): void {
    this.connections.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  /**
   * Who holds how much of a prompt; nobody is an empty answer.
   *
   * Throws `BAD_TOKENS`, `BAD_CHUNK_KEY`, `MODEL_AMBIGUOUS`, `MODEL_NOT_FOUND`.
   */
  async lookup(chunks: Chunks): Promise<LookupResponse> {
    const request = chunkFields(chunks);
    return await this.connections.call((to, options) => to.cache.lookup(request, options));
  }

  /** A standing call for many lookups, which cost less over it; to be closed. */
  lookupStream(): LookupStream {
    return new LookupStream(this.connections);
  }

  /**
   * Has chunks fetched by the destination and then dropped by the source.
   *
   * Throws what `lookup` throws, `INSTANCE_NOT_FOUND`, `TIER_UNSUPPORTED`, `KV_SPEC_MISMATCH`, `BAD_SELECTION`, `FULL`.
   */
  async move(move: Move): Promise<MoveOperation> {
    return await this.transfer(move, false);
  }

  /** As `move`, and the source keeps what it has. */
  async copy(move: Move): Promise<MoveOperation> {
    return await this.transfer(move, true);
  }

  private async transfer({ source, destination, requestId, ...chunks }: Move, copy: boolean): Promise<MoveOperation> {
    const request = {
      ...chunkFields(chunks),
      oldPosition: parsePosition(source),
      newPosition: parsePosition(destination),
      copy,
      requestId: requestId ?? randomUUID(),
    };
    return await this.book((to) => to.call((options) => to.cache.move(request, options)));
  }

  /**
   * Keeps chunks from eviction for a while; answers which are really held, and kept.
   *
   * Throws what `lookup` throws, `INSTANCE_NOT_FOUND`, `TIER_UNSUPPORTED`, `BAD_SELECTION`, `FULL`.
   */
  async pin({ position, ttlSeconds = 300, requestId, ...chunks }: Pin): Promise<PinnedChunks> {
    const request = {
      ...chunkFields(chunks),
      position: parsePosition(position),
      ttl: durationFromMs(Math.round(ttlSeconds * 1000)),
      requestId: requestId ?? randomUUID(),
    };
    const { pin } = await this.connections.call((to, options) => to.cache.pin(request, options));
    if (!pin) throw new LmkvError("the coordinator answered without a pin", "INTERNAL", "INTERNAL");
    return pin;
  }

  /** Ends a pin early; one that is gone is no error. */
  async unpin(pinId: string): Promise<void> {
    await this.connections.call((to, options) => to.cache.unpin({ pinId }, options));
  }

  /** Every pin in force, ordered by id. */
  async pins(): Promise<PinnedChunks[]> {
    return await this.connections.ask((to) =>
      gather(
        to.pages((page, options) => to.cache.listPins(page, options)),
        (page) => page.pins,
      ),
    );
  }

  /**
   * Has instances, or one, forget chunks. Pinned chunks stay.
   *
   * Throws what `lookup` throws, `INSTANCE_NOT_FOUND`, `BAD_SELECTION`, `FULL`.
   */
  async clear(clear: Clear): Promise<ClearOperation> {
    const request = {
      ...chunkFields(clear),
      instanceId: clear.instanceId ?? "",
      tier: clear.tier ?? Tier.UNSPECIFIED,
      all: clear.everything ?? false,
      dryRun: clear.dryRun ?? false,
      requestId: clear.requestId ?? randomUUID(),
    };
    return await this.book((to) => to.call((options) => to.cache.clear(request, options)));
  }

  /** Every operation that runs or, unless only those are asked for, ended not too long ago; newest first. */
  async operations({ running = false } = {}): Promise<Operation[]> {
    const filter = running ? "done=false" : "";
    return await this.connections.ask(async (connection) => {
      const pages = connection.pages((page, options) =>
        connection.operations.listOperations({ ...page, filter }, options),
      );
      const messages = await gather(pages, (page) => page.operations);
      return messages.map((message) => new Operation(this.connections, message));
    });
  }

  /** The operation of this name, whoever began it. Throws `OPERATION_NOT_FOUND`. */
  async operation(name: string): Promise<Operation> {
    const message = await this.connections.call((to, options) => to.operations.getOperation({ name }, options));
    return new Operation(this.connections, message);
  }

  /** Every registered instance, ordered by id. */
  async instances(): Promise<Instance[]> {
    return await this.connections.ask((to) =>
      gather(
        to.pages((page, options) => to.registry.listInstances(page, options)),
        (page) => page.instances,
      ),
    );
  }

  /**
   * Tells what changes in the layout map, for ever: what is held now first, or what changed after a revision.
   *
   * After a loss it goes on from where it was; where that cannot be, because changes were missed, it begins anew with an
   * update that says `reset`. Throws `UNREACHABLE` if the coordinator does not respond for `retrySeconds`.
   */
  watch(options: WatchOptions = {}): AsyncGenerator<LayoutUpdate, void, void> {
    return watch(this.connections, options);
  }

  /** The operation that a call begins. */
  private async book<Progress extends Message, Result extends Message>(
    begin: (to: Connection) => Promise<OperationMessage>,
  ): Promise<Operation<Progress, Result>> {
    return new Operation(this.connections, await this.connections.ask(begin));
  }
}

async function gather<Page, Entry>(pages: AsyncIterable<Page>, entriesOf: (page: Page) => Entry[]): Promise<Entry[]> {
  const entries: Entry[] = [];
  for await (const page of pages) entries.push(...entriesOf(page));
  return entries;
}
