//! Intel's ISA-L, Debian's libisal, by its C interface: tables from coefficients, full encode, update with one input.
//! The safe part checks every count and length, because the C code checks none.

use std::ffi::{c_int, c_uchar};

use anyhow::{Context, Result, ensure};
use storaged_codec::CodingMatrix;

// SAFETY: these are the declarations of `isa-l/erasure_code.h`, with the pointers that are only read from as `const`.
#[link(name = "isal")]
unsafe extern "C" {
    fn ec_init_tables(k: c_int, rows: c_int, a: *const c_uchar, tables: *mut c_uchar);
    fn ec_encode_data(
        len: c_int,
        k: c_int,
        rows: c_int,
        tables: *const c_uchar,
        data: *const *const c_uchar,
        coding: *const *mut c_uchar,
    );
    fn ec_encode_data_update(
        len: c_int,
        k: c_int,
        rows: c_int,
        vec_i: c_int,
        tables: *const c_uchar,
        data: *const c_uchar,
        coding: *const *mut c_uchar,
    );
}

/// Bytes of table for each coefficient.
const TABLE: usize = 32;

/// Coefficients, expanded for ISA-L's kernels.
pub struct Tables {
    k: usize,
    rows: usize,
    tables: Vec<u8>,
}

impl Tables {
    /// Expands the coefficients of a code's parity blocks.
    ///
    /// # Errors
    /// None for any matrix that there is: as for [`Self::new`].
    pub fn of(matrix: &CodingMatrix) -> Result<Self> {
        let m = matrix.geometry().m();
        let rows: Vec<&[u8]> = (0..m).map(|j| matrix.parity_row(j)).collect();
        Self::new(&rows)
    }

    /// Expands the rows of coefficients, one row for each output, all over the same inputs.
    ///
    /// # Errors
    /// Unless there are 1 to 255 rows of one length from 1 to 255.
    pub fn new(rows: &[&[u8]]) -> Result<Self> {
        let k = rows.first().map_or(0, |row| row.len());
        let fits = (1..=255).contains(&k) && rows.len() <= 255;
        let alike = rows.iter().all(|row| row.len() == k);
        ensure!(
            fits && alike,
            "expected 1 to 255 rows of one length from 1 to 255, got {} rows, the first of length {k}",
            rows.len()
        );
        let coefficients = rows.concat();
        let mut tables = vec![0; TABLE * coefficients.len()];
        // SAFETY: the function reads k * rows bytes of coefficients, which `concat` of rows of length k has, and
        // writes 32 for each of them, which `tables` has. Both counts are at most 255, so no cast loses anything.
        unsafe {
            ec_init_tables(
                k as c_int,
                rows.len() as c_int,
                coefficients.as_ptr(),
                tables.as_mut_ptr(),
            );
        }
        let rows = rows.len();
        Ok(Self { k, rows, tables })
    }

    /// `out[j] = sum over i of rows[j][i] * data[i]`.
    ///
    /// # Errors
    /// Unless there are as many blocks as coefficients, all of one length below 2 GiB.
    pub fn encode(&self, data: &[&[u8]], out: &mut [&mut [u8]]) -> Result<()> {
        let length = data.first().map_or(0, |block| block.len());
        let inputs = data.len();
        ensure!(inputs == self.k, "expected {} inputs, got {inputs}", self.k);
        let len = self.check(length, out)?;
        let alike = data.iter().all(|block| block.len() == length);
        ensure!(alike, "expected inputs of {length} bytes, got another");
        let inputs: Vec<*const c_uchar> = data.iter().map(|block| block.as_ptr()).collect();
        let outputs: Vec<*mut c_uchar> = out.iter_mut().map(|block| block.as_mut_ptr()).collect();
        // SAFETY: `inputs` has k pointers to `len` bytes that are borrowed for reading, `outputs` one for each row to
        // `len` bytes that are borrowed for writing and so overlap nothing; both were counted and measured above.
        // The tables were made for this k and number of rows. The function keeps no pointer.
        unsafe {
            ec_encode_data(
                len,
                self.k as c_int,
                self.rows as c_int,
                self.tables.as_ptr(),
                inputs.as_ptr(),
                outputs.as_ptr(),
            );
        }
        Ok(())
    }

    /// `out[j] ^= rows[j][input] * data`.
    ///
    /// # Errors
    /// Unless `input` is below the number of inputs, there is an output for each row, and all are of one length below
    /// 2 GiB.
    pub fn update(&self, input: usize, data: &[u8], out: &mut [&mut [u8]]) -> Result<()> {
        ensure!(
            input < self.k,
            "expected an input below {}, got {input}",
            self.k
        );
        let len = self.check(data.len(), out)?;
        let outputs: Vec<*mut c_uchar> = out.iter_mut().map(|block| block.as_mut_ptr()).collect();
        // SAFETY: `data` is borrowed for reading and has `len` bytes; `outputs` has one pointer for each row to `len`
        // bytes that are borrowed for writing and so overlap nothing; `input` is below the tables' k: all checked
        // above. The function keeps no pointer.
        unsafe {
            ec_encode_data_update(
                len,
                self.k as c_int,
                self.rows as c_int,
                input as c_int,
                self.tables.as_ptr(),
                data.as_ptr(),
                outputs.as_ptr(),
            );
        }
        Ok(())
    }

    fn check(&self, length: usize, out: &[&mut [u8]]) -> Result<c_int> {
        ensure!(
            out.len() == self.rows,
            "expected {} outputs, got {}",
            self.rows,
            out.len()
        );
        let alike = out.iter().all(|block| block.len() == length);
        ensure!(alike, "expected outputs of {length} bytes, got another");
        c_int::try_from(length).with_context(|| format!("expected below 2 GiB, got {length}"))
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, RngCore, SeedableRng};
    use storaged_codec::{CodingMatrix, Geometry, engine, engine_named};

    use super::Tables;
    use crate::codec::case::GEOMETRIES;

    fn blocks(random: &mut StdRng, count: usize, length: usize) -> Vec<Vec<u8>> {
        let block = |_| {
            let mut block = vec![0; length];
            random.fill_bytes(&mut block);
            block
        };
        (0..count).map(block).collect()
    }

    fn shared(blocks: &[Vec<u8>]) -> Vec<&[u8]> {
        blocks.iter().map(Vec::as_slice).collect()
    }

    fn exclusive(blocks: &mut [Vec<u8>]) -> Vec<&mut [u8]> {
        blocks.iter_mut().map(Vec::as_mut_slice).collect()
    }

    fn same_parity(random: &mut StdRng, k: usize, m: usize, length: usize) {
        let matrix = CodingMatrix::cauchy(Geometry::new(k, m).expect("a geometry"));
        let tables = Tables::of(&matrix).expect("rows");
        let data = blocks(random, k, length);
        let (mut ours, mut theirs, mut oracle) = (
            blocks(random, m, length),
            blocks(random, m, length),
            blocks(random, m, length),
        );
        let data = shared(&data);
        engine().encode(&matrix, &data, &mut exclusive(&mut ours));
        let naive = engine_named("naive").expect("always there");
        naive.encode(&matrix, &data, &mut exclusive(&mut oracle));
        let encoded = tables.encode(&data, &mut exclusive(&mut theirs));
        encoded.expect("blocks that fit");
        assert!(ours == oracle, "({k},{m}) at {length}: ours");
        assert!(theirs == oracle, "({k},{m}) at {length}: ISA-L");

        let mut sums = vec![vec![0; length]; m];
        for (i, block) in data.iter().enumerate() {
            let updated = tables.update(i, block, &mut exclusive(&mut sums));
            updated.expect("blocks that fit");
        }
        assert!(sums == oracle, "({k},{m}) at {length}: ISA-L's update");
    }

    #[test]
    fn parity_is_ours_in_every_geometry_of_the_bench() {
        let mut random = StdRng::seed_from_u64(11);
        for (k, m) in GEOMETRIES {
            for _ in 0..20 {
                let length = random.random_range(1..20_000);
                same_parity(&mut random, k, m, length);
            }
        }
    }

    #[test]
    fn parity_is_ours_at_short_lengths_and_any_geometry() {
        let mut random = StdRng::seed_from_u64(12);
        for length in 1..=300 {
            let (k, m) = (random.random_range(1..40), random.random_range(1..12));
            same_parity(&mut random, k, m, length);
        }
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        assert!(Tables::new(&[]).is_err());
        assert!(Tables::new(&[&[]]).is_err());
        assert!(Tables::new(&[&[1, 2], &[1]]).is_err());
        let tables = Tables::new(&[&[1, 2]]).expect("a row");
        let (a, b, mut out) = ([1; 8], [2; 8], [0; 8]);
        assert!(tables.encode(&[&a], &mut [&mut out]).is_err());
        assert!(tables.encode(&[&a, &b[1..]], &mut [&mut out]).is_err());
        assert!(tables.encode(&[&a, &b], &mut [&mut out[1..]]).is_err());
        assert!(tables.encode(&[&a, &b], &mut []).is_err());
        assert!(tables.update(2, &a, &mut [&mut out]).is_err());
        assert!(tables.update(1, &a, &mut [&mut out[1..]]).is_err());
        assert!(tables.update(1, &a, &mut [&mut out]).is_ok());
    }
}
