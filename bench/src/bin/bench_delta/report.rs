//! delta.json and delta.md.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context;
use serde_json::{Value, json};
use storaged_bench::codec::machine::Machine;

use crate::corpus::Corpus;
use crate::integrity::Integrity;
use crate::links::Loss;
use crate::measure::{Figure, Row};

/// One case on the terminal.
pub fn line(row: &Row) -> String {
    format!(
        "{:<20} {:>4} MiB  chosen {}  back {:.2} GB/s  zstd {}  {:?}",
        row.name,
        row.bytes >> 20,
        cell(row.chosen),
        row.back_gbps,
        cell(row.zstd),
        row.kinds
    )
}

pub fn write(
    out: &Path,
    commit: &str,
    corpus: &Corpus,
    rows: &[Row],
    losses: &[Loss],
    integrity: &Integrity,
) -> anyhow::Result<()> {
    let machine = Machine::read().description;
    let keys = keys(rows, losses)?;
    let mut record = json!({
        "commit": commit,
        "date": time::OffsetDateTime::now_utc().date().to_string(),
        "machine": machine,
        "corpus": {"torch": corpus.torch, "seed": corpus.seed},
        "cases": rows.iter().map(case).collect::<Value>(),
        "links": losses,
        "integrity": integrity,
    });
    for (key, value) in &keys {
        record[*key] = json!(value);
        println!("{key} {value:.4}");
    }
    std::fs::create_dir_all(out)?;
    let text = serde_json::to_string_pretty(&record)? + "\n";
    std::fs::write(out.join("delta.json"), text)?;
    let table = table(commit, &machine, corpus, rows, losses, integrity, &keys);
    std::fs::write(out.join("delta.md"), table)?;
    Ok(())
}

fn keys(rows: &[Row], losses: &[Loss]) -> anyhow::Result<BTreeMap<&'static str, f64>> {
    let row = |name: &str| {
        let found = rows.iter().find(|row| row.name == name);
        found.with_context(|| format!("expected the case {name} in the corpus"))
    };
    let worst = losses.iter().map(|loss| loss.time_of_raw - 1.0);
    let (fp32, bf16) = (row("adamw_fp32_master")?, row("adamw_bf16_weight")?);
    Ok(BTreeMap::from([
        ("frozen_ratio", row("frozen")?.chosen.ratio),
        ("lora_ratio", row("lora")?.chosen.ratio),
        ("adamw_fp32_master_ratio", fp32.chosen.ratio),
        ("adamw_bf16_weight_ratio", bf16.chosen.ratio),
        ("fp32_delta_gbps", fp32.chosen.gbps),
        ("bf16_delta_gbps", bf16.chosen.gbps),
        ("cost_model_worst_loss", worst.fold(f64::MIN, f64::max)),
    ]))
}

fn case(row: &Row) -> Value {
    json!({
        "name": row.name,
        "element_size": row.element,
        "bytes": row.bytes,
        "changed_share_by_chunk_kib": row.changed,
        "chosen": row.chosen,
        "back_gbps": row.back_gbps,
        "chosen_after_ten_steps": row.chosen_t10,
        "chosen_by_chunk_kib": row.by_chunk,
        "subtract_planes": row.subtract,
        "xor_planes": row.xor,
        "zstd_alone": row.zstd,
        "zstd_previous_as_dictionary": row.zstd_previous,
        "vcdiff": row.vcdiff,
        "records": row.kinds.iter().copied().collect::<BTreeMap<_, _>>(),
    })
}

fn cell(figure: Figure) -> String {
    let digits = if figure.ratio < 0.1 { 4 } else { 3 };
    format!("{:.digits$} at {:.2}", figure.ratio, figure.gbps)
}

fn table(
    commit: &str,
    machine: &str,
    corpus: &Corpus,
    rows: &[Row],
    losses: &[Loss],
    integrity: &Integrity,
    keys: &BTreeMap<&'static str, f64>,
) -> String {
    let mut text = format!(
        "# Deltas on real training state\n\nMade by `make bench-delta` at commit {commit}; {machine}; corpus: torch {}, \
         seed {}.\nOne core. Cells are *size left of raw* at *GB/s of raw bytes*. Chunks of 256 KiB where nothing else is said.\n\n",
        corpus.torch, corpus.seed
    );
    text += "## One step apart\n\n| state | changed chunks 64 KiB / 256 KiB / 1 MiB | chosen | and back, GB/s | ten steps apart \
             | subtract planes | XOR planes | zstd alone | zstd, previous state as dictionary | VCDIFF (8 chunks) |\n";
    text += "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";
    for row in rows {
        let percent = |at: usize| format!("{:.1} %", 100.0 * row.changed[at].1);
        let changed = format!("{} / {} / {}", percent(0), percent(2), percent(4));
        let _ = writeln!(
            text,
            "| {} | {changed} | **{}** | {:.2} | {} | {} | {} | {} | {} | {} |",
            row.name,
            cell(row.chosen),
            row.back_gbps,
            cell(row.chosen_t10),
            cell(row.subtract),
            cell(row.xor),
            cell(row.zstd),
            cell(row.zstd_previous),
            cell(row.vcdiff)
        );
    }
    text += "\n*Chosen*: what the writer takes for a link of 50 MB/s, element size found by sampling. zstd is level 1.\n";
    text += "\n## Chunk size\n\n| state | 64 KiB | 128 KiB | 256 KiB | 512 KiB | 1 MiB |\n| --- | --- | --- | --- | --- | --- |\n";
    for row in rows {
        let cells: Vec<String> = row
            .by_chunk
            .iter()
            .map(|(_, figure)| cell(*figure))
            .collect();
        let _ = writeln!(text, "| {} | {} |", row.name, cells.join(" | "));
    }
    text += &links(losses);
    let rates = integrity.leaf_digest_gbps.iter();
    let rates: Vec<String> = rates
        .map(|(chunk, rate)| format!("{rate:.2} at {chunk} KiB"))
        .collect();
    let _ = write!(
        text,
        "\n## Digests\n\nGB/s of one core from RAM: leaf digest {}; memcpy {:.2}; encode (8,2) {:.2}. Of a save's copy, digest \
         and code together the digest takes {:.0} %.\n",
        rates.join(", "),
        integrity.memcpy_gbps,
        integrity.encode_8_2_gbps,
        100.0 * integrity.digest_share_of_save_path
    );
    text += "\n## Keys\n\n| key | value |\n| --- | --- |\n";
    for (key, value) in keys {
        let _ = writeln!(text, "| `{key}` | {value:.4} |");
    }
    text
}

fn links(losses: &[Loss]) -> String {
    let mut text = String::from(
        "\n## The cost model\n\nTime until the last byte is through, of the time that raw chunks take on the same link: encoding \
         timed, the link computed.\nIn brackets the bytes that were sent, of raw.\n\n",
    );
    let rates: Vec<f64> = losses.iter().map(|loss| loss.link_gbps).collect();
    let count = rates.iter().skip(1).position(|rate| *rate == rates[0]);
    let count = count.map_or(rates.len(), |at| at + 1);
    let head: Vec<String> = rates[..count]
        .iter()
        .map(|rate| format!("{rate} GB/s"))
        .collect();
    let _ = writeln!(text, "| state | {} |", head.join(" | "));
    let _ = writeln!(text, "|{}", " --- |".repeat(count + 1));
    for of_case in losses.chunks(count) {
        let cells = of_case
            .iter()
            .map(|loss| format!("{:.3} ({:.3})", loss.time_of_raw, loss.ratio));
        let cells: Vec<String> = cells.collect();
        let _ = writeln!(text, "| {} | {} |", of_case[0].case, cells.join(" | "));
    }
    text
}
